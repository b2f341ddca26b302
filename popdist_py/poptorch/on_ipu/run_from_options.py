"""The conversion of PopTorch options and optimisers to ``Settings`` for memory and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from popdist_py.ipu.graph import Placement, Type
from popdist_py.ipu.runs.model_graph import LEAST_PROPORTION, ModelGraph
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Location, Optimizer, OutputMode, Recompute, Settings, Strategy
from popdist_py.popart import RecomputationType
from popdist_py.poptorch import enums
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.profile_folder import profile_folder
from popdist_py.poptorch.placement.execution_strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
)
from popdist_py.poptorch.update.device_optimizer import kind_of

__all__ = ["optimizer_of", "run_from_options", "settings_of"]

# The table of execution strategies does not contain ``PipelinedExecution``, because a pipeline's
# strategy is named after its schedule (``grouped``, for example).
_STRATEGIES: Final[Mapping[type, Strategy]] = MappingProxyType(
    {
        ShardedExecution: "sharded",
        SerialPhasedExecution: "serial phased",
        ParallelPhasedExecution: "parallel phased",
    }
)
# With ``RecomputationType.Standard``, PopART chooses recomputation checkpoints automatically. If
# the user's program marks checkpoints, the estimates use only them (this is assumed).
# ``RecomputationType.RecomputeAll`` without marks would recompute everything at once and save no
# memory. The estimates therefore use the checkpoints of ``Standard``.
_RECOMPUTATION: Final[Mapping[RecomputationType, Recompute]] = MappingProxyType(
    {
        RecomputationType.NoRecompute: "none",
        RecomputationType.Standard: "standard",
        RecomputationType.NormOnly: "norm",
        RecomputationType.Pipeline: "stage",
        RecomputationType.RecomputeAll: "standard",
    }
)
_OUTPUT_MODES: Final[Mapping[enums.OutputMode, OutputMode]] = MappingProxyType(
    {
        enums.OutputMode.Final: "final",
        enums.OutputMode.EveryN: "every n",
        enums.OutputMode.All: "all",
        enums.OutputMode.Sum: "sum",
    }
)
# The attribute of ``Location`` (the memory for one kind of tensors) for each key of PopTorch's
# ``TensorLocationSettings``.
_LOCATION_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "onChip": "on_chip",
        "useReplicatedTensorSharding": "is_sharded",
        "minElementsForOffChip": "min_off_chip",
        "minElementsForReplicatedTensorSharding": "min_sharded",
    }
)
# Some state tensors of an optimiser exist only if a setting of the optimiser, such as ``momentum``,
# is not 0 or False. ``_NEEDED_WITH`` maps the key of an optional state tensor to the name of the
# setting that needs the tensor.
_NEEDED_WITH: Final[Mapping[str, str]] = MappingProxyType(
    {"momentum_buffer": "momentum", "grad_avg": "centered"}
)


def run_from_options(
    model: ModelGraph,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    *,
    training: bool,
    replicas: int | None = None,
) -> Run:
    """Return the configuration of a run, from a model's graph and the PopTorch options.

    Args:
        model: The graph of the model's forward pass.
        options: The options of the PopTorch model, which also name the type of IPU.
        optimizer: The user's optimiser, or None for inference.
        training: Whether the model is used for training.
        replicas: The number of replicas of all instances together. If ``replicas`` is None, the
            number of replicas comes from the PopTorch options.

    Raises:
        Error: A PopART session option has a value that PopART does not support, or the environment
            variable ``POPLAR_ENGINE_OPTIONS`` is not JSON.
    """
    if replicas is None:
        replicas = options.replication_factor * options.Distributed.numProcesses
    settings = settings_of(model, options, optimizer, training=training, replicas=replicas)
    return Run(model.graph, model.placement, settings, options.Emulator.ipu)


def settings_of(
    model: ModelGraph,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    *,
    training: bool,
    replicas: int,
) -> Settings:
    """Return the PopTorch options that change the memory, the schedule or the time on IPUs.

    Raises:
        Error: A PopART session option has a value that PopART does not support, or the environment
            variable ``POPLAR_ENGINE_OPTIONS`` is not JSON.
    """
    locations = options.TensorLocations
    io_tiles = locations("numIOTiles") if locations.exists("numIOTiles") else 0
    batching = options.batching(training=training)
    return Settings(
        is_training=training,
        strategy=_strategy(options),
        accumulation=batching.gradient_accumulation if training else 1,
        device_iterations=batching.device_iterations,
        replicas=replicas,
        optimizer=Optimizer() if optimizer is None else optimizer_of(optimizer),
        recompute=_recompute(options, model),
        recomputes_last=_has_checkpoint(model, model.placement.num_stages - 1),
        weight_location=_location(options, "location_weight"),
        accumulator_location=_location(options, "location_accumulator"),
        optimizer_location=_location(options, "location_optimizer"),
        activation_location=_location(options, "location_activation"),
        partials=_partials(options, is_convolution=True),
        matmul_partials=_partials(options, is_convolution=False),
        memory_proportion=_proportions(options, model.placement, is_convolution=True),
        matmul_proportion=_proportions(options, model.placement, is_convolution=False),
        io_tiles=io_tiles,
        overlaps_io=options.overlap_conditions(training).allowed,
        output_mode=_OUTPUT_MODES[batching.output_mode],
        output_return_period=batching.output_period,
        synthetic_data=options.synthetic_data,
        is_profiled=profile_folder(options) is not None,
    )


def optimizer_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Return the element types of an optimiser's state tensors and gradient accumulators.

    If one parameter group of the optimiser needs a state tensor, the state tensor is counted for
    all parameter groups. The optimisers of torch (unlike those of PopTorch) store all their state
    in float32.

    Raises:
        AssertionError: The emulated IPU does not support the optimiser.
    """
    is_combined = bool(getattr(optimizer, "use_combined_accum", False))
    state = tuple(
        _state_type(optimizer, name)
        for key, name in kind_of(optimizer).state.items()
        if key != "step" and (_is_needed(optimizer, key) or is_combined)
    )
    is_half = getattr(optimizer, "accum_type", torch.float32) == torch.float16
    return Optimizer(
        state=state, accumulator="float16" if is_half else "float32", is_combined=is_combined
    )


def _is_needed(optimizer: torch.optim.Optimizer, key: str) -> bool:
    setting = _NEEDED_WITH.get(key)
    return setting is None or any(group[setting] for group in optimizer.param_groups)


def _state_type(optimizer: torch.optim.Optimizer, name: str) -> Type:
    # Only the optimisers of ``poptorch.optim`` have the method ``_state_type``, which returns the
    # element type of a state tensor.
    type_of = getattr(optimizer, "_state_type", None)
    return "float16" if type_of is not None and type_of(name) == torch.float16 else "float32"


def _strategy(options: Options) -> Strategy:
    chosen = options._execution_strategy
    is_off = options._Popart.session_value("enablePipelining") is False
    if isinstance(chosen, PipelinedExecution) and not is_off:
        return chosen._schedule
    return next(name for kind, name in _STRATEGIES.items() if isinstance(chosen, kind))


def _recompute(options: Options, model: ModelGraph) -> Recompute:
    if options._Popart.session_value("autoRecomputation") is None:
        return "default"
    found = _RECOMPUTATION[options._Popart.session_member("autoRecomputation", RecomputationType)]
    is_marked = any(operation.is_checkpoint for operation in model.graph.operations)
    return "stage" if found == "standard" and is_marked else found


def _has_checkpoint(model: ModelGraph, stage: int) -> bool:
    operations = model.placement.operations_of(model.graph, stage)
    return any(operation.is_checkpoint for operation in operations)


def _location(options: Options, name: str) -> Location:
    locations = options.TensorLocations
    given = locations(name) if locations.exists(name) else {}
    fields: dict[str, Any] = {
        _LOCATION_FIELDS[key]: value for key, value in given.items() if key in _LOCATION_FIELDS
    }
    for flag in ("on_chip", "is_sharded"):
        if flag in fields:
            fields[flag] = bool(fields[flag])
    return Location(**fields)


def _partials(options: Options, *, is_convolution: bool) -> Type:
    """Return the element type of the partial sums inside convolutions or matrix products."""
    given = options._Popart.session_value(
        "convolutionOptions partialsType" if is_convolution else "partialsTypeMatMuls"
    )
    return "float16" if given == "half" else "float32"


def _proportions(
    options: Options, placement: Placement, *, is_convolution: bool
) -> float | tuple[float, ...]:
    """Return the available memory proportion of matrix products on each IPU.

    An IPU that the PopTorch options do not name gets the default memory proportion.
    """
    given: Mapping[int, float] = options.available_memory_proportion
    default = _default_proportion(options, is_convolution=is_convolution)
    if not given:
        return default
    return tuple(
        max(given.get(ipu, default), LEAST_PROPORTION) for ipu in range(placement.num_ipus)
    )


def _default_proportion(options: Options, *, is_convolution: bool) -> float:
    """Return the available memory proportion of IPUs that the program does not name.

    Raises:
        Error: A PopART session option sets a memory proportion that is not a number from 0 to 1.
    """
    given = options._Popart.session_value(
        "convolutionOptions availableMemoryProportion"
        if is_convolution
        else "matmulOptions availableMemoryProportion"
    )
    if given is None:
        return Settings().proportion(0)
    try:
        share = float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share <= 1:
        name = "convolutionOptions" if is_convolution else "matmulOptions"
        raise Error(
            f"The session option {name} has availableMemoryProportion={given!r}: expected a "
            "number from 0 to 1"
        )
    return max(share, LEAST_PROPORTION)
