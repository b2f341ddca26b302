"""The groups of Options: Training, Precision, TensorLocations, Jit, Distributed, _Popart, Emulator.

This module contains the defaults and setters of the groups. The class Options is in ``options.py``.
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
# The session options of the executable cache, which do not change executables.
_CACHING: Final = ("enableEngineCaching", "cachePath")
Compression = Literal["none", "fp16", "bf16", "powersgd"]
# The settings of gradientCompression("powersgd"). The defaults are those of torch's powerSGD_hook.
_POWER_SGD: Final = {"rank": 1, "start_step": 1000, "warm_start": True}
_Location = TypeVar("_Location", bound="TensorLocationSettings")


class _PopartOptions(OptionStore):
    """The session options of PopART. Most session options do not change results."""

    def __init__(self) -> None:
        super().__init__(instrumentWithHardwareCycleCounter=False, rearrangeAnchorsOnHost=False)

    @property
    def options(self) -> dict[str, Any]:
        """The session options that a program has set or that have a default."""
        return cast(dict[str, Any], self._values)

    def set(self, key: str, value: Any) -> _PopartOptions:  # type: ignore[override]
        """Set one session option. The name is checked when a model is compiled.

        As in PopTorch, the arguments are a name and a value, because names may contain dots.
        """
        self.checkIsFrozen()
        self._change(key, value)
        return self

    def _change(self, name: str, value: Any) -> None:
        self._values[name] = value

    def update(self, key: str, entries: Mapping[str, Any]) -> None:
        """Add ``entries`` to the session option ``key``, whose value is a dictionary."""
        self.set(key, {**self.options.get(key, {}), **entries})

    def check(self) -> None:
        """Check all session options that a program has set.

        Raises:
            Error: A name is unknown, or a value that must be a dictionary is not a dictionary.
        """
        session.check(self.options)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set the options of Poplar's class Engine."""
        return self.set("engineOptions", dict(engine_options))

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> _PopartOptions:
        """Switch graph patterns of the compiler on or off, which does not change results."""
        assert isinstance(level, int), f"level is {level!r}: expected a whole number"
        self.set("patterns_level", level)
        for name, enabled in patterns.items():
            self.set(f"patterns.{name}", bool(enabled))
        return self

    def _description(self) -> tuple[Any, ...]:
        """Return all session options except those of the executable cache."""
        described = {key: value for key, value in self.options.items() if key not in _CACHING}
        return (type(self).__name__, sorted(described.items()))


class _SessionGroup(OptionStore):
    """A group of options with setters that also set session options of PopART.

    Args:
        popart: The session options of the same Options object.
        **defaults: The group's own options and their defaults.
    """

    def __init__(self, popart: _PopartOptions, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._declare(_popart=popart)

    def _groups(self) -> dict[str, OptionStore]:
        return {}


class _JitOptions(OptionStore):
    """Deprecated options for tracing models."""

    _place = "Options.Jit"

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Do nothing except log that this option is deprecated.

        Raises:
            ValueError: ``trace_model`` is True.
        """
        old_spellings.say("Options.Jit", "traceModel")
        if trace_model:
            raise ValueError("traceModel(True): tracing is gone, remove the call or pass False")
        return self


class _TrainingOptions(_SessionGroup):
    """Options that affect only training models."""

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
        """Set the number of micro-batches (GA) whose gradients make one weight update."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Choose whether a weight update uses the mean or the sum of the gradients.

        The gradients are those of all micro-batches and of the replicas of all instances.

        Args:
            reduction_type: Mean divides the sum of the gradients by GA times the number of
                replicas. Sum does not divide it.

        Raises:
            ValueError: ``reduction_type`` is neither Sum nor Mean.
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
        """Choose how the mean of gradients is computed.

        Args:
            mean_reduction_strategy: Running keeps a running mean. Post divides the sum once, at the
                end.

        Raises:
            ValueError: The argument is not a MeanReductionStrategy.
        """
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
        """Adapt the loss scaling during training, which makes ``loss_scaling`` variable."""
        self.checkIsFrozen()
        self._popart.set("automaticLossScalingSettings.enabled", bool(enabled))
        return self

    @property
    def automatic_loss_scaling(self) -> bool:
        """Whether the loss scaling adapts during training."""
        return bool(self._popart.options.get("automaticLossScalingSettings.enabled"))

    @property
    def automatic_loss_scaling_settings(self) -> dict[str, Any]:
        """The settings of automatic loss scaling that a program has set.

        The keys are the attributes of the class AutomaticLossScaling.
        """
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
        """Choose how gradients are compressed between hosts; PopTorch does not have this option.

        Within a host, gradients are summed without compression. If compression loses a part of the
        gradients in one step, this part is added to the gradients of the next step.

        Args:
            method: The compression. ``none`` is the default. ``fp16`` and ``bf16`` send gradients
                in 16 bits. ``powersgd`` sends each matrix as two factors of low rank.
            rank: The number of columns of the factors of ``powersgd``; 1 by default.
            start_step: The number of steps before ``powersgd`` begins to compress gradients; 1000
                by default.
            warm_start: Whether ``powersgd`` computes new factors from the factors of the previous
                step, which is the default. False makes each step start from random numbers.

        Raises:
            ValueError: The method is unknown, the method does not have one of the settings, or a
                value is out of range.
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
        """The compression method for gradients between hosts, and the method's settings."""
        return dict(self._values.get("gradient_compression", {"method": "none"}))

    def distributedBatchNormReplicaGroupSize(self, n: int) -> _TrainingOptions:
        """Set the number of replicas (n) that share the statistics of batch norms; 1 by default.

        PopTorch does not have this option. It follows the option
        ``norms.experimental.distributed_batch_norm_replica_group_size`` of TensorFlow's IPUConfig.

        In forward and backward passes of a training model, batch norms normalise over the
        micro-batches of n replicas with consecutive global indices. These replicas may belong to
        several instances. The option affects the batch norms of torch.nn and calls of
        torch.nn.functional.batch_norm. Lower-level functions such as torch.batch_norm use the
        statistics of one replica.

        Batch norms of an inference model never use the statistics of other replicas. These batch
        norms use the running statistics or, in training mode, statistics of the replica's samples.

        Args:
            n: The number of replicas in a group, which must divide the number of replicas of all
                instances.

        Raises:
            ValueError: ``n`` is not a whole number, or is below 1.
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
        """The number of replicas that share the statistics of batch norms."""
        return int(self._values.get("norm_group_size", 1))

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions more evenly over tiles, which does not change results."""
        assert isinstance(enabled, bool), f"enabled is {enabled!r}: expected a bool"
        self.checkIsFrozen()
        self._popart.update("convolutionOptions", {"enableConvDithering": str(enabled).lower()})
        return self


def _check_power_sgd(name: str, value: object) -> None:
    """Check a setting of gradientCompression("powersgd").

    Raises:
        ValueError: The value has the wrong type or is too small.
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
    """Options for number formats and rounding."""

    _place = "Options.Precision"

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(popart, half_float_casting=enums.HalfFloatCastingBehavior.Default)

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Choose whether divisions by zero, invalid operations and overflows raise Error."""
        assert isinstance(enabled, bool), (
            f"enableFloatingPointExceptions needs a bool, got {type(enabled)}"
        )
        self.checkIsFrozen()
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    @property
    def floating_point_exceptions(self) -> bool:
        """Whether divisions by zero, invalid operations and overflows on the device raise Error."""
        return engine_options.trap(self._popart.options)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round float16 results up or down at random, so that the expected value is exact."""
        assert isinstance(enabled, bool), (
            f"enableStochasticRounding needs a bool, got {type(enabled)}"
        )
        self.checkIsFrozen()
        self._popart.set("enableStochasticRounding", enabled)
        return self

    @property
    def stochastic_rounding(self) -> bool:
        """Whether float16 results are rounded at random."""
        return bool(self._popart.options.get("enableStochasticRounding"))

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the number format of partial sums in matrix products and convolutions.

        The format affects only the emulated memory and time. Results do not depend on the format,
        because the emulation always computes these sums in float32.

        Raises:
            ValueError: ``dtype`` is neither torch.float nor torch.half.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if dtype not in names:
            raise ValueError(f"Invalid partials type {dtype}: expected torch.float or torch.half")
        self.checkIsFrozen()
        self._popart.set("partialsTypeMatMuls", names[dtype])
        self._popart.update("convolutionOptions", {"partialsType": names[dtype]})
        return self

    def halfFloatCasting(self, half_float_casting: Any) -> _PrecisionOptions:
        """Do nothing except log that this option is deprecated.

        Operations on float16 and float32 tensors follow torch's rules.
        """
        old_spellings.say("Options.Precision", "halfFloatCasting")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Do nothing except log that this option is deprecated.

        Running statistics keep the number format that the model gives them.

        Raises:
            ValueError: ``value`` is not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(f"runningStatisticsAlwaysFloat({value!r}): expected a bool")
        old_spellings.say("Options.Precision", "runningStatisticsAlwaysFloat")
        return self


class TensorLocationSettings:
    """The location of one kind of tensors, such as weights, in the memory of the device.

    The location affects the emulated memory and time, but not the results.
    """

    def __init__(self, **values: int) -> None:
        self._content: dict[str, int] = dict(values)

    def _put(self: _Location, name: str, value: int, kind: type) -> _Location:
        assert isinstance(value, kind), (
            f"Invalid type {type(value)} of {name}: expected {kind.__name__}"
        )
        self._content[name] = int(value)
        return self

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Store the tensors on the chip (True) or off the chip (False); None leaves this open."""
        if use is None:
            self._content.pop("onChip", None)
            return self
        return self._put("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Split each tensor into shards, and store one shard on each replica."""
        return self._put("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through I/O tiles."""
        return self._put("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through I/O tiles."""
        return self._put("useIOTilesToStore", use, bool)

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Store tensors with fewer than ``min_elements`` elements on the chip."""
        return self._put("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not split tensors with fewer than ``min_elements`` elements into shards."""
        return self._put("minElementsForReplicatedTensorSharding", min_elements, int)

    def toDict(self) -> dict[str, int]:
        """Return the settings of the location that a program has set."""
        return dict(self._content)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({', '.join(f'{k}={v}' for k, v in self._content.items())})"


class _TensorLocationOptions(OptionStore):
    """The locations of activations, weights, optimiser state and gradient accumulators."""

    def _locate(self, name: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), (
            f"Invalid type {type(location)} of {name}: expected TensorLocationSettings"
        )
        self.createOrSet(**{name: location.toDict()})
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of activations."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of weights."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of the optimiser's state."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of gradient accumulators."""
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Reserve an even number of tiles, from 32 to 192, for input and output."""
        assert isinstance(num_tiles, int), f"numIOTiles({num_tiles!r}): expected a whole number"
        assert 32 <= num_tiles <= 192, f"numIOTiles({num_tiles}): expected 32 to 192"
        assert num_tiles % 2 == 0, f"numIOTiles({num_tiles}): expected an even number"
        self.createOrSet(numIOTiles=num_tiles)
        return self


class _DistributedOptions(OptionStore):
    """The index of this process, and the number of processes of the job.

    Args:
        process_id: The index of this process, from 0; by default the rank that Open MPI sets.
        num_processes: The number of processes; by default the number that Open MPI sets.
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
        """Treat this process as the only process, even if Open MPI has started several."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read the number of processes and the index of this process from environment variables.

        Args:
            var_num_processes: The variable that contains the number of processes.
            var_process_id: The variable that contains the index of this process.
        """
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process, from 0, and the number of processes."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """The index of this process, from 0."""
        return cast(int, self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """The number of processes."""
        return cast(int, self._values["num_distributed_processes"])


class _EmulatorOptions(OptionStore):
    """Options for the emulation and the emulated device; PopTorch does not have this group.

    Raises:
        ValueError: An environment variable contains an unknown device or memory mode.
    """

    # The value for objects that an older version saved without this attribute.
    _environment = DeviceEnvironment()

    def __init__(self) -> None:
        super().__init__(
            replica_execution="auto",
            double_precision=False,
            deterministic_reduction=os.environ.get("POPDIST_DETERMINISTIC", "0") == "1",
        )
        self._declare(_environment=DeviceEnvironment.of(os.environ, sys.modules))

    def replicaExecution(self, how: Execution) -> _EmulatorOptions:
        """Choose how the replicas of this process run.

        Args:
            how: ``loop`` runs the replicas in sequence, and its results are the reference.
                ``fused`` runs all replicas in one vectorised pass. ``auto`` measures in the first
                steps which of the two is faster. If ``randomSeed`` is set, ``auto`` chooses by a
                fixed rule instead of measured times.

        Raises:
            ValueError: ``how`` has another value.
        """
        if how not in ("auto", "loop", "fused"):
            raise ValueError(f"replicaExecution({how!r}): expected 'auto', 'loop' or 'fused'")
        self.set(replica_execution=how)
        return self

    def doublePrecision(self, enabled: bool = True) -> _EmulatorOptions:
        """Compute with float64 tensors in float64, instead of in float32 as an IPU does."""
        self.set(double_precision=enabled)
        return self

    def deterministicReduction(self, enabled: bool = True) -> _EmulatorOptions:
        """Sum the replicas' gradients in one fixed order, for any number of instances.

        Then the results of R replicas are equal to the bit for any number of instances and threads.
        The model computes on one thread. ``POPDIST_DETERMINISTIC=1`` makes True the default.
        """
        self.set(deterministic_reduction=enabled)
        return self

    def device(self, ipu: Literal["mk1", "mk2", "bow"] | IPU) -> _EmulatorOptions:
        """Choose the IPU whose memory, cycles and latencies are emulated.

        If a program does not call this method, ``--ipu-model`` or ``POPDIST_IPU`` choose the IPU.
        The second default is the IPU of ``useIpuModel`` or ``POPTORCH_IPU_MODEL``. The third
        default is an Mk2, for programs that import ``poptorch`` and that ``poprun`` or
        ``python -m popdist_py`` started.

        Without a chosen IPU, times are those of the host, and a model that is too large for an Mk2
        causes a warning.

        Args:
            ipu: The name of an IPU, or a :class:`popdist_py.ipu.specification.IPU`.

        Raises:
            ValueError: ``ipu`` is neither the name of an IPU nor an IPU object.
        """
        self.createOrSet(device=ipu_of(f"Emulator.device({ipu!r})", ipu))
        return self

    def memory(self, mode: MemoryMode) -> _EmulatorOptions:
        """Choose the action when a compiled model does not fit into the memory of the IPU.

        The environment variable ``POPDIST_IPU_MEMORY`` sets the default. If it is not set, the
        default is ``enforce`` if an IPU is chosen, and ``warn`` if no IPU is chosen.

        Args:
            mode: ``enforce`` raises an error, as hardware does. ``warn`` logs a warning. ``off``
                does not check the memory.

        Raises:
            ValueError: ``mode`` has another value.
        """
        self.createOrSet(memory=mode_of(f"Emulator.memory({mode!r})", mode))
        return self

    def _use_model(self, use_model: bool) -> None:
        """Store the argument of ``Options.useIpuModel``, which calls this method."""
        self.createOrSet(uses_ipu_model=use_model)

    @property
    def is_ipu_model(self) -> bool:
        """Whether the program uses the software model of an IPU instead of a device."""
        uses_model: bool | None = self._values.get("uses_ipu_model")
        return self._environment.uses_model if uses_model is None else uses_model

    @property
    def device_named(self) -> IPU | None:
        """The IPU that the program, the launcher or an environment variable chooses, or None."""
        own: IPU | None = self._values.get("device")
        return own or self._environment.named(uses_model=self._values.get("uses_ipu_model"))

    @property
    def ipu(self) -> IPU:
        """The IPU whose memory and time are emulated; an Mk2 if no IPU is chosen."""
        return self.device_named or ASSUMED_IPU

    @property
    def memory_mode(self) -> MemoryMode:
        """The action when a compiled model does not fit into the memory of the IPU."""
        default: MemoryMode = "warn" if self.device_named is None else "enforce"
        mode: MemoryMode = self._values.get("memory") or self._environment.memory or default
        return mode

    @property
    def asks_model(self) -> bool:
        """Whether the memory or the time of an IPU is estimated when a model is compiled."""
        return self.memory_mode != "off" or self.device_named is not None

    def _description(self) -> tuple[Any, ...]:
        """Return all values of the group, the chosen IPU and the memory mode."""
        return (*super()._description(), self.device_named, self.memory_mode)
