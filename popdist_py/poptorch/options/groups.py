"""The groups of Options: Training, Precision, TensorLocations, Jit, Distributed, _Popart, Emulator.

Every default of a group stands here, once. Options themselves live in ``options.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, cast, get_args

import torch

from popdist_py.ipu.specification import IPU
from popdist_py.poptorch import enums, old_spellings
from popdist_py.poptorch.options import engine_options, session
from popdist_py.poptorch.options.device_choice import (
    ASSUMED_IPU,
    DeviceEnvironment,
    MemoryMode,
    ipu_of,
    mode_of,
)
from popdist_py.poptorch.options.store import OptionStore, check_count

__all__ = [
    "TensorLocationSettings",
    "_DistributedOptions",
    "_EmulatorOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]

Execution = Literal["auto", "loop", "fused"]
# Where executables are cached, which changes none of them.
_CACHING: Final = ("enableEngineCaching", "cachePath")
Compression = Literal["none", "fp16", "bf16", "powersgd"]
# The settings of gradientCompression("powersgd"), with torch's defaults for its powerSGD_hook.
_POWER_SGD: Final = {"rank": 1, "start_step": 1000, "warm_start": True}
_Location = TypeVar("_Location", bound="TensorLocationSettings")


class _PopartOptions(OptionStore):
    """Session options of PopART, by name; they have no numeric effect unless said otherwise."""

    def __init__(self) -> None:
        super().__init__(instrumentWithHardwareCycleCounter=False, rearrangeAnchorsOnHost=False)

    @property
    def options(self) -> dict[str, Any]:
        """The session options that were set, and those with a default."""
        return cast(dict[str, Any], self._values)

    def set(self, key: str, value: Any) -> _PopartOptions:  # type: ignore[override]
        """Set one session option; names are checked when a model is compiled.

        The arguments are PopTorch's: names have dots in them.
        """
        self.checkIsFrozen()
        self._change(key, value)
        return self

    def _change(self, name: str, value: Any) -> None:
        self._values[name] = value

    def update(self, key: str, entries: Mapping[str, Any]) -> None:
        """Add ``entries`` to the session option ``key``, which holds a dictionary."""
        self.set(key, {**self.options.get(key, {}), **entries})

    def check(self) -> None:
        """Check all session options that were set.

        Raises:
            Error: an unknown name, or a value that is not a dictionary where one is expected.
        """
        session.check(self.options)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set the options of the engine."""
        return self.set("engineOptions", dict(engine_options))

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> _PopartOptions:
        """Switch graph patterns; no numeric effect."""
        assert isinstance(level, int), f"level is {level!r}: expected a whole number"
        self.set("patterns_level", level)
        for name, enabled in patterns.items():
            self.set(f"patterns.{name}", bool(enabled))
        return self

    def _description(self) -> tuple[Any, ...]:
        """Return all values but where executables are cached, on which no executable depends."""
        described = {key: value for key, value in self.options.items() if key not in _CACHING}
        return (type(self).__name__, sorted(described.items()))


class _SessionGroup(OptionStore):
    """A group some of whose setters store session options, which belong to Options."""

    def __init__(self, popart: _PopartOptions, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._declare(_popart=popart)

    def _groups(self) -> dict[str, OptionStore]:
        return {}


class _JitOptions(OptionStore):
    """Deprecated: how the model is traced."""

    _place = "Options.Jit"

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Accept False; there is one way of tracing.

        Raises:
            ValueError: ``trace_model`` is True.
        """
        old_spellings.say("Options.Jit", "traceModel")
        if trace_model:
            raise ValueError("traceModel(True): tracing is gone, remove the call or pass False")
        return self


class _TrainingOptions(_SessionGroup):
    """Options of training models only."""

    _place = "Options.Training"

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(
            popart,
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def _check(self) -> None:
        check_count("gradientAccumulation", self.gradient_accumulation)

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the micro-batches (GA) whose gradients make one weight update."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Set whether gradients are divided by GA times the total replicas (Mean) or not (Sum).

        Raises:
            ValueError: any other type.
        """
        if reduction_type not in (enums.ReductionType.Sum, enums.ReductionType.Mean):
            raise ValueError(
                f"Unsupported reduction type {reduction_type!r} for accumulation and "
                "replication: expected ReductionType.Sum or ReductionType.Mean"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean is divided: Running (a running mean) or Post (once, at the end)."""
        if not isinstance(mean_reduction_strategy, enums.MeanReductionStrategy):
            raise ValueError(
                f"Invalid mean reduction strategy {mean_reduction_strategy!r}: expected a "
                "MeanReductionStrategy"
            )
        if mean_reduction_strategy == enums.MeanReductionStrategy.PostAndLoss:
            old_spellings.say("MeanReductionStrategy", "PostAndLoss")
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Let the loss scaling adapt while training; makes ``loss_scaling`` variable."""
        self.checkIsFrozen()
        self._popart.set("automaticLossScalingSettings.enabled", bool(enabled))
        return self

    @property
    def automatic_loss_scaling(self) -> bool:
        """Whether the loss scaling adapts while training."""
        return bool(self._popart.options.get("automaticLossScalingSettings.enabled"))

    @property
    def automatic_loss_scaling_settings(self) -> dict[str, Any]:
        """How the loss scaling adapts: what was set, by the names of AutomaticLossScaling."""
        kinds = {
            "bin_edge_location": ("binEdgeLocation", float),
            "threshold_upper_count_proportion": ("thresholdUpperCountProportion", float),
            "update_period": ("updatePeriod", int),
        }
        values = self._popart.options
        return {
            name: kind(values[f"automaticLossScalingSettings.{key}"])
            for name, (key, kind) in kinds.items()
            if f"automaticLossScalingSettings.{key}" in values
        }

    def gradientCompression(
        self,
        method: Compression,
        rank: int | None = None,
        start_step: int | None = None,
        warm_start: bool | None = None,
    ) -> _TrainingOptions:
        """Choose how gradients travel between hosts; PopTorch has no such option.

        Within a host they are added up as they are. What a step leaves out is added to the
        gradients of the next one.

        Args:
            method: ``none`` sends them as they are, the default; ``fp16`` and ``bf16`` in 16 bits;
                ``powersgd`` sends matrices as two thin factors.
            rank: of ``powersgd``: columns of the factors, 1 by default.
            start_step: of ``powersgd``: steps whose gradients travel as they are, 1000 by default.
            warm_start: of ``powersgd``: whether factors start from those of the step before, which
                is the default, or from random numbers.

        Raises:
            ValueError: any other method, a setting that the method does not have, or a value out
                of range.
        """
        self.checkIsFrozen()
        if method not in get_args(Compression):
            raise ValueError(
                f"gradientCompression({method!r}): expected 'none', 'fp16', 'bf16' or 'powersgd'"
            )
        given = {"rank": rank, "start_step": start_step, "warm_start": warm_start}
        settings = {name: value for name, value in given.items() if value is not None}
        if settings and method != "powersgd":
            raise ValueError(
                f"gradientCompression({method!r}, {next(iter(settings))}=...): only 'powersgd' "
                f"has {', '.join(_POWER_SGD)}; leave it out"
            )
        for name, value in settings.items():
            _check_power_sgd(name, value)
        self.deleteIfExists("gradient_compression")
        if method != "none":
            more = {**_POWER_SGD, **settings} if method == "powersgd" else {}
            self.createOrSet(gradient_compression={"method": method, **more})
        return self

    @property
    def gradient_compression_settings(self) -> dict[str, Any]:
        """How gradients travel between hosts: ``method``, and the settings that it has."""
        return dict(self._values.get("gradient_compression", {"method": "none"}))

    def distributedBatchNormReplicaGroupSize(self, n: int) -> _TrainingOptions:
        """Set of how many replicas (n) batch norms take their statistics together; 1 by default.

        After ``norms.experimental.distributed_batch_norm_replica_group_size`` of TensorFlow's
        IPUConfig; PopTorch has no such option. The batch norms of the training model normalise over
        the micro-batches of n replicas with consecutive global indices, forward and backward,
        whichever instances these are on. Batch norms are torch.nn's, and calls of
        torch.nn.functional.batch_norm; what a program calls below that, such as torch.batch_norm,
        stays a replica's own. An inference model never asks other replicas: its batch norms take
        the running statistics, or, in training mode, those of the replica's own samples.

        Args:
            n: divides the number of replicas of all instances.

        Raises:
            ValueError: no whole number, or below 1.
        """
        self.checkIsFrozen()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(
                f"distributedBatchNormReplicaGroupSize({n!r}): expected a whole number, 1 or more"
            )
        self.deleteIfExists("norm_group_size")
        if n > 1:
            self.createOrSet(norm_group_size=n)
        return self

    @property
    def norm_group_size(self) -> int:
        """Of how many replicas batch norms take their statistics together."""
        return int(self._values.get("norm_group_size", 1))

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions over tiles; no numeric effect."""
        assert isinstance(enabled, bool), f"enabled is {enabled!r}: expected a bool"
        self.checkIsFrozen()
        self._popart.update("convolutionOptions", {"enableConvDithering": str(enabled).lower()})
        return self


def _check_power_sgd(name: str, value: object) -> None:
    """Check a setting of gradientCompression("powersgd").

    Raises:
        ValueError: another type, or too small.
    """
    call = f"gradientCompression('powersgd', {name}={value!r})"
    if name == "warm_start":
        if not isinstance(value, bool):
            raise ValueError(f"{call}: expected a bool")
        return
    least = 1 if name == "rank" else 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{call}: expected a whole number, {least} or more")


class _PrecisionOptions(_SessionGroup):
    """Options on number formats."""

    _place = "Options.Precision"

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(popart, half_float_casting=enums.HalfFloatCastingBehavior.Default)

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise Error for divisions by zero, invalid operations and overflows on the device."""
        assert isinstance(enabled, bool), (
            f"enableFloatingPointExceptions needs a bool, got {type(enabled)}"
        )
        self.checkIsFrozen()
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    @property
    def floating_point_exceptions(self) -> bool:
        """Whether invalid operations and overflows on the device raise."""
        return engine_options.trap(self._popart.options)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round half results up or down at random, so that their expectation is exact."""
        assert isinstance(enabled, bool), (
            f"enableStochasticRounding needs a bool, got {type(enabled)}"
        )
        self.checkIsFrozen()
        self._popart.set("enableStochasticRounding", enabled)
        return self

    @property
    def stochastic_rounding(self) -> bool:
        """Whether half results are rounded at random."""
        return bool(self._popart.options.get("enableStochasticRounding"))

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the format in which matrix products and convolutions add up.

        It counts in the memory and time of the device's model; here sums are float32 always.

        Raises:
            ValueError: neither torch.float nor torch.half.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if dtype not in names:
            raise ValueError(f"Invalid partials type {dtype}: expected torch.float or torch.half")
        self.checkIsFrozen()
        self._popart.set("partialsTypeMatMuls", names[dtype])
        self._popart.update("convolutionOptions", {"partialsType": names[dtype]})
        return self

    def halfFloatCasting(self, half_float_casting: Any) -> _PrecisionOptions:
        """Do nothing: deprecated, half and float mix as in torch."""
        old_spellings.say("Options.Precision", "halfFloatCasting")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Do nothing: deprecated, running statistics keep their own format.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(f"runningStatisticsAlwaysFloat({value!r}): expected a bool")
        old_spellings.say("Options.Precision", "runningStatisticsAlwaysFloat")
        return self


class TensorLocationSettings:
    """Where the tensors of one kind live: it counts in memory and time, and changes no number."""

    def __init__(self, **values: int) -> None:
        self._content: dict[str, int] = dict(values)

    def _put(self: _Location, name: str, value: int, kind: type) -> _Location:
        assert isinstance(value, kind), (
            f"Invalid type {type(value)} of {name}: expected {kind.__name__}"
        )
        self._content[name] = int(value)
        return self

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Keep the tensors on the chip (True), off it (False), or undecided (None)."""
        if use is None:
            self._content.pop("onChip", None)
            return self
        return self._put("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Shard the tensors over replicas."""
        return self._put("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through I/O tiles."""
        return self._put("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through I/O tiles."""
        return self._put("useIOTilesToStore", use, bool)

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep smaller tensors on the chip."""
        return self._put("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard smaller tensors."""
        return self._put("minElementsForReplicatedTensorSharding", min_elements, int)

    def toDict(self) -> dict[str, int]:
        """Return what was set."""
        return dict(self._content)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({', '.join(f'{k}={v}' for k, v in self._content.items())})"


class _TensorLocationOptions(OptionStore):
    """Where activations, weights, optimiser state and accumulators live."""

    def _locate(self, name: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), (
            f"Invalid type {type(location)} of {name}: expected TensorLocationSettings"
        )
        self.createOrSet(**{name: location.toDict()})
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Place activations."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Place weights."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Place the optimiser's state."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Place the gradient accumulators."""
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set aside an even number of tiles, 32 to 192, for input and output."""
        assert isinstance(num_tiles, int), f"numIOTiles({num_tiles!r}): expected a whole number"
        assert 32 <= num_tiles <= 192, f"numIOTiles({num_tiles}): expected 32 to 192"
        assert num_tiles % 2 == 0, f"numIOTiles({num_tiles}): expected an even number"
        self.createOrSet(numIOTiles=num_tiles)
        return self


class _DistributedOptions(OptionStore):
    """Which of several processes this one is.

    Args:
        process_id: index of this process, from 0; None takes what Open MPI says.
        num_processes: number of processes; None likewise.
    """

    _place = "Options.Distributed"

    def __init__(self, process_id: int | None = None, num_processes: int | None = None) -> None:
        if process_id is None:
            process_id = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if num_processes is None:
            num_processes = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        super().__init__(
            num_distributed_processes=num_processes,
            distributed_process_id=process_id,
            ipuof_configs={},
        )
        self._declare(_gcd_mappings={})

    def disable(self) -> _DistributedOptions:
        """Be one process, whatever the environment says."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read the number of processes and the index of this one from these variables."""
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Be process ``process_id`` (from 0) of ``num_processes``."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """Index of this process, from 0."""
        return cast(int, self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """Number of processes."""
        return cast(int, self._values["num_distributed_processes"])


class _EmulatorOptions(OptionStore):
    """How this emulation computes, and on which device; PopTorch has no such group.

    Raises:
        ValueError: a variable names a device, or a mode of memory, that does not exist.
    """

    # Of objects that older versions saved, which have none.
    _environment = DeviceEnvironment()

    def __init__(self) -> None:
        super().__init__(
            replica_execution="auto",
            double_precision=False,
            deterministic_reduction=os.environ.get("POPDIST_DETERMINISTIC", "0") == "1",
        )
        self._declare(_environment=DeviceEnvironment.of(os.environ, sys.modules))

    def replicaExecution(self, how: Execution) -> _EmulatorOptions:
        """Choose how local replicas run.

        Args:
            how: ``loop`` runs one after the other and defines the result; ``fused`` runs all in
                one vectorised pass; ``auto`` finds the fastest in the first steps, or takes one
                by a rule, and by no time, if ``randomSeed`` is set.

        Raises:
            ValueError: any other name.
        """
        if how not in ("auto", "loop", "fused"):
            raise ValueError(f"replicaExecution({how!r}): expected 'auto', 'loop' or 'fused'")
        self.set(replica_execution=how)
        return self

    def doublePrecision(self, enabled: bool = True) -> _EmulatorOptions:
        """Keep float64 tensors in float64 instead of computing in float32 as an IPU does."""
        self.set(double_precision=enabled)
        return self

    def deterministicReduction(self, enabled: bool = True) -> _EmulatorOptions:
        """Add the replicas' gradients in one fixed order, whatever the split over instances.

        The same R replicas then give the same bits for every number of instances and threads: the
        model computes on one thread. The default is what ``POPDIST_DETERMINISTIC=1`` says.
        """
        self.set(deterministic_reduction=enabled)
        return self

    def device(self, ipu: Literal["mk1", "mk2", "bow"] | IPU) -> _EmulatorOptions:
        """Name the IPU: a model has to fit into its memory, and its cycles and latencies count.

        Defaults, the first that is set: ``--ipu-model`` or ``POPDIST_IPU``; ``useIpuModel`` or
        ``POPTORCH_IPU_MODEL``; an Mk2 for programs that import ``poptorch`` under ``poprun`` or
        ``python -m popdist_py``. Else times are the host's, and models too large for an Mk2 warn.

        Args:
            ipu: a name, or any :class:`popdist_py.ipu.specification.IPU`.

        Raises:
            ValueError: neither.
        """
        self.createOrSet(device=ipu_of(f"Emulator.device({ipu!r})", ipu))
        return self

    def memory(self, mode: MemoryMode) -> _EmulatorOptions:
        """Choose what happens when a model is compiled that the IPU has no room for.

        Args:
            mode: ``enforce`` raises, as hardware does, and is the default where a device is named;
                ``warn`` says so and goes on, and is the default elsewhere; ``off`` does not look.
                ``POPDIST_IPU_MEMORY`` is another default.

        Raises:
            ValueError: any other mode.
        """
        self.createOrSet(memory=mode_of(f"Emulator.memory({mode!r})", mode))
        return self

    def _use_model(self, use_model: bool) -> None:
        """Take the word of ``Options.useIpuModel``, which is not of this group."""
        self.createOrSet(uses_ipu_model=use_model)

    @property
    def is_ipu_model(self) -> bool:
        """Whether the software model of a device is used, for which no device is needed."""
        uses_model: bool | None = self._values.get("uses_ipu_model")
        return self._environment.uses_model if uses_model is None else uses_model

    @property
    def device_named(self) -> IPU | None:
        """The IPU that program, launcher or environment name, in this order."""
        own: IPU | None = self._values.get("device")
        return own or self._environment.named(uses_model=self._values.get("uses_ipu_model"))

    @property
    def ipu(self) -> IPU:
        """The IPU whose model is asked: an Mk2 where none is named."""
        return self.device_named or ASSUMED_IPU

    @property
    def memory_mode(self) -> MemoryMode:
        """What happens when a model is compiled that the IPU has no room for."""
        default: MemoryMode = "warn" if self.device_named is None else "enforce"
        mode: MemoryMode = self._values.get("memory") or self._environment.memory or default
        return mode

    @property
    def asks_model(self) -> bool:
        """Whether compiling asks the model of the device: for memory, for times, or for both."""
        return self.memory_mode != "off" or self.device_named is not None

    def _description(self) -> tuple[Any, ...]:
        """Return all values, with what the environment says of the device."""
        return (*super()._description(), self.device_named, self.memory_mode)
