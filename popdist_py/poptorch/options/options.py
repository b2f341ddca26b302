"""Options: what a program says about how its model runs. Groups live in ``groups.py``.

Every default of an option stands here, once, and one setter for each option: hence the length.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from popdist_py.popart import SyntheticDataMode
from popdist_py.poptorch import enums, old_spellings
from popdist_py.poptorch.calls.batching import Batching, check_groups
from popdist_py.poptorch.errors import ConfigFileError, Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options import from_text
from popdist_py.poptorch.options.device_choice import OFFLINE_TARGETS
from popdist_py.poptorch.options.groups import (
    TensorLocationSettings,
    _DistributedOptions,
    _EmulatorOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)
from popdist_py.poptorch.options.store import OptionStore, check_count
from popdist_py.poptorch.placement import execution_strategies
from popdist_py.poptorch.tracing.operator_limits import check_proportion
from popdist_py.poptorch.tracing.overlapped_io import OverlapConditions

__all__ = [
    "ConfigFileError",
    "Options",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_EmulatorOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]

_UNLIMITED: Final = 2**64 - 1


class Options(OptionStore):
    """Everything that a model or a data loader needs to know about how to run.

    Setters return the object, so that they can be chained. Using the object in a data loader or a
    model freezes it. ``Options(ipus_per_replica=n)`` makes :class:`DistributedOptions`, because
    ``popdist.poptorch.Options`` and ``poptorch.Options`` are one class here.
    """

    Training: _TrainingOptions
    Precision: _PrecisionOptions
    TensorLocations: _TensorLocationOptions
    Distributed: _DistributedOptions
    Jit: _JitOptions
    Emulator: _EmulatorOptions
    _Popart: _PopartOptions

    _place = "Options"

    # What ``ipus_per_replica`` makes: a subclass, which enters itself here.
    _for_launcher: ClassVar[type[Options]]
    # What a file of setter calls may name beside the setters: ``poptorch`` enters itself here.
    _names_in_files: ClassVar[dict[str, Any]] = {}

    def __new__(cls, *_: Any, **arguments: Any) -> Options:
        """Make the object; with PopDist's argument, one of the subclass for the launcher's jobs.

        PopDist and PopTorch each have a class ``Options``, and programs of both write
        ``Options(...)``. Here the two packages are one, so the name is one, and the argument that
        only PopDist's has tells which is meant. What comes back is still an ``Options``.
        """
        named_by_popdist = cls is Options and "ipus_per_replica" in arguments
        return super().__new__(Options._for_launcher if named_by_popdist else cls)

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always,
            sync_pattern=enums.SyncPattern.Full,
            available_memory_proportion={},
            max_repeat_logs=4,
        )
        popart = _PopartOptions()
        self._declare(
            Training=_TrainingOptions(popart),
            Precision=_PrecisionOptions(popart),
            TensorLocations=_TensorLocationOptions(),
            Distributed=self._make_distributed(),
            Jit=_JitOptions(),
            Emulator=_EmulatorOptions(),
            _Popart=popart,
            _execution_strategy=execution_strategies.PipelinedExecution(),
            _show_compilation_progress_bar=True,
            _module_namescope_enabled=True,
            _relax_optimizer_checks=False,
            _source_location_excludes=[],
        )
        self._apply_environment()

    def _make_distributed(self) -> _DistributedOptions:
        return _DistributedOptions()

    def _apply_environment(self) -> None:
        """Take the settings that the environment gives to every new object."""
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            self.from_json(defaults)
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            logger.info("POPTORCH_CACHE_DIR is set: executables are cached in %s", cache)
            self.enableExecutableCaching(cache)

    # -- batching -----------------------------------------------------------------------------

    def _check(self) -> None:
        check_count("deviceIterations", self.device_iterations)
        check_count("replicationFactor", self.replication_factor)
        check_groups(self.replication_factor, self.input_group_size, self.input_cgt)

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set how many iterations (DI) the device loops over in one call."""
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number R of copies of the model that this process runs.

        Raises:
            ValueError: the groups of inputReplicaGrouping() do not divide it.
        """
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(
        self, input_group_size: int, input_cgt: enums.CommGroupType
    ) -> Options:
        """Let groups of ``input_group_size`` replicas share the same input.

        Set the replication factor first.

        Raises:
            ValueError: type All, a group larger than R, or a size that does not divide R.
        """
        if input_cgt == enums.CommGroupType.NoGrouping:
            input_group_size, input_cgt = 1, enums.CommGroupType.Consecutive
        self.set(input_group_size=input_group_size, input_cgt=input_cgt)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Say whether buffers are equal on all replicas; False gives each replica its own.

        The statistics of batch and instance norms are each replica's own in any case.
        """
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    @old_spellings.takes("Options.outputMode()")
    def outputMode(
        self, output_mode: enums.OutputMode, output_return_period: int | None = None
    ) -> Options:
        """Choose which micro-batches' outputs a call returns.

        Args:
            output_mode: All, Final, Sum, EveryN, or Default (All for inference, else Final).
            output_return_period: N of EveryN; ignored for other modes.
        """
        mode, period = _output_mode(output_mode, output_return_period)
        self.set(output_mode=mode, output_return_period=period)
        return self

    def defaultOutputMode(self) -> bool:
        """Tell whether no output mode was chosen."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def resolved_output_mode(self, training: bool) -> enums.OutputMode:
        """Return the output mode; one that was not chosen depends on ``training``."""
        if not self.defaultOutputMode():
            return enums.OutputMode(self.output_mode)
        return enums.OutputMode.Final if training else enums.OutputMode.All

    @old_spellings.takes("Options.anchorTensor()")
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: enums.OutputMode | None = None,
        output_return_period: int = 1,
    ) -> None:
        """Return the tensor ``long_name`` of the model under ``short_name`` after each call.

        Without ``output_mode`` it follows the mode of the model's outputs.
        """
        self.checkIsFrozen()
        if output_mode is None:
            entry: list[Any] = [long_name, True]
        else:
            mode, period = _output_mode(output_mode, output_return_period)
            entry = [long_name, False, mode, period]
        self._values["anchored_tensors"][short_name] = entry

    def batching(self, training: bool) -> Batching:
        """Return the factors of a model; the default output mode depends on ``training``."""
        return Batching(
            device_iterations=self.device_iterations,
            gradient_accumulation=self.Training.gradient_accumulation,
            replicas=self.replication_factor,
            group_size=self.input_group_size,
            group_type=self.input_cgt,
            output_mode=self.resolved_output_mode(training),
            output_period=self.output_return_period,
        )

    # -- execution ----------------------------------------------------------------------------

    def randomSeed(self, random_seed: int) -> Options:
        """Seed the random streams of the device, and torch's own."""
        assert isinstance(random_seed, int), f"randomSeed({random_seed!r}): expected an integer"
        self.createOrSet(random_seed=random_seed)
        torch.manual_seed(random_seed)
        return self

    def setExecutionStrategy(self, strategy: Any) -> Options:
        """Choose how blocks become stages on IPUs."""
        if isinstance(strategy, enums.AutoStage):
            strategy = execution_strategies.PipelinedExecution(strategy)
        assert isinstance(strategy, execution_strategies._IExecutionStrategy), (
            f"Invalid type {type(strategy)}: expected an execution strategy such as "
            "PipelinedExecution or ShardedExecution"
        )
        self.checkIsFrozen()
        object.__setattr__(self, "_execution_strategy", strategy)
        return self

    def setAvailableMemoryProportion(
        self, available_memory_proportion: Mapping[str, float]
    ) -> Options:
        """Set the share of memory that operators may use, per IPU: ``{"IPU0": 0.5}``.

        Raises:
            AssertionError: a key that names no IPU, or a share that is not from 0 to 1.
        """
        assert isinstance(available_memory_proportion, Mapping), (
            f"Expected a dictionary such as {{'IPU0': 0.5}}, got {available_memory_proportion!r}"
        )
        proportions: dict[int, float] = {}
        for key, value in available_memory_proportion.items():
            ipu = re.fullmatch(r"IPU(\d+)", str(key))
            assert ipu is not None, f"Invalid key {key!r}: expected IPU0, IPU1, ..."
            check_proportion(value, f"{key} in setAvailableMemoryProportion")
            proportions[int(ipu[1])] = value
        self.set(available_memory_proportion=proportions)
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Round the number of IPUs up to a power of two instead of raising."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def enableStableNorm(self, enabled: bool) -> Options:
        """Use the numerically stable form of group norms, as torch always does."""
        self._Popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Make inputs on the device instead of sending them, and send no results.

        Inputs are random and normally distributed, whole numbers zeros; results have their shapes
        and are zeros. ``_Popart.set("syntheticDataMode", mode)`` chooses other inputs.
        """
        mode = SyntheticDataMode.RandomNormal if enabled else SyntheticDataMode.Off
        self._Popart.set("syntheticDataMode", int(mode))
        return self

    @property
    def synthetic_data(self) -> bool:
        """Whether inputs are made on the device."""
        return bool(self._Popart.options.get("syntheticDataMode"))

    @property
    def synthetic_mode(self) -> SyntheticDataMode:
        """How inputs are made on the device.

        Raises:
            Error: in none of the ways that there are.
        """
        mode = self._Popart.options.get("syntheticDataMode", SyntheticDataMode.Off)
        try:
            return SyntheticDataMode(int(mode))
        except (TypeError, ValueError):
            known = ", ".join(f"{each.value} ({each.name})" for each in SyntheticDataMode)
            raise Error(
                f"The session option syntheticDataMode is {mode!r}: expected one of {known}"
            ) from None

    def updatableNamedBuffers(self, buffers: list[str]) -> Options:
        """Name the buffers that copyNamedBuffersToDevice() sends."""
        self._Popart.set("updatableNamedBuffers", list(buffers))
        return self

    @property
    def updatable_buffers(self) -> tuple[str, ...]:
        """The buffers that copyNamedBuffersToDevice() sends."""
        return tuple(self._Popart.options.get("updatableNamedBuffers", ()))

    # -- device -------------------------------------------------------------------------------

    def useIpuModel(self, use_model: bool) -> Options:
        """Have the memory and the time of the device's model: ``Emulator.device`` says which.

        What computes is an emulation in any case. Without a device named this is an Mk2;
        ``POPTORCH_IPU_MODEL_VERSION=ipu1``, ``ipu2`` or ``ipu21`` is another default.
        """
        _check_type("useIpuModel", use_model, bool)
        self.createOrSet(use_model=use_model)
        self.Emulator._use_model(use_model)
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        """Attach to the device of this id."""
        _check_type("useIpuId", ipu_id, int)
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self, ipu_target_version: int = 2) -> Options:
        """Compile without a device, for version 1 (Mk1), 2 (Mk2) or 21 (Bow) of the IPU."""
        if ipu_target_version not in OFFLINE_TARGETS:
            raise ValueError(
                f"useOfflineIpuTarget({ipu_target_version}): expected one of "
                f"{tuple(OFFLINE_TARGETS)}"
            )
        self.set(connection_type=enums.ConnectionType.Never)
        self.Emulator.device(OFFLINE_TARGETS[ipu_target_version])
        self.createOrSet(ipu_version=ipu_target_version)
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        """Choose when the model attaches to its device."""
        assert isinstance(connection_type, enums.ConnectionType), (
            f"Invalid type {type(connection_type)}: expected a ConnectionType"
        )
        self.set(connection_type=connection_type)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        """Choose how IPUs synchronise; no numeric effect."""
        assert isinstance(sync_pattern, enums.SyncPattern), (
            f"Invalid type {type(sync_pattern)}: expected a SyncPattern"
        )
        self.set(sync_pattern=sync_pattern)
        return self

    # -- observation --------------------------------------------------------------------------

    def logDir(self, log_dir: str | Path) -> Options:
        """Set the folder of logs; none are written here."""
        _check_type("logDir", log_dir, str | Path)
        self.set(log_dir=str(log_dir))
        return self

    def maxRepeatLogs(self, max_repeat_lines: int | None) -> Options:
        """Limit how often one line is logged, None is no limit; here all lines are shown."""
        self.set(max_repeat_logs=_UNLIMITED if max_repeat_lines is None else max_repeat_lines)
        return self

    def modelName(self, name: str) -> Options:
        """Name the folder of the model's reports; none are written here."""
        _check_type("modelName", name, str)
        self.createOrSet(model_name=name)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Count and log the IPU cycles of every call."""
        self._Popart.set("instrumentWithHardwareCycleCounter", bool(log_cycle_count))
        return self

    @property
    def counts_cycles(self) -> bool:
        """Whether the IPU cycles of every call are counted."""
        return bool(self._Popart.options["instrumentWithHardwareCycleCounter"])

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        """Record a timeline of this process, written into ``profile_dir`` when the program ends.

        Without ``profile_dir`` it is written into the current folder.
        """
        wanted = {"autoReport.all": "true", "debug.allowOutOfMemory": "true"}
        if profile_dir is not None:
            wanted["autoReport.directory"] = str(profile_dir)
        self._Popart.update("engineOptions", from_text.engine_options(wanted))
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Show the bar "Graph compilation"; compilationTime() needs it."""
        return self._put("_show_compilation_progress_bar", bool(show))

    def disableModuleNamescope(self) -> Options:
        """Do not derive name scopes from module names."""
        return self._put("_module_namescope_enabled", False)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Log unexpected optimiser attributes at DEBUG instead of WARN."""
        return self._put("_relax_optimizer_checks", bool(relax))

    def sourceLocationExcludes(self, excludes: Iterable[str]) -> Options:
        """Replace the filters of recorded source lines, which are read in reports only."""
        return self._put("_source_location_excludes", list(excludes))

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Add filters of recorded source lines, which are read in reports only."""
        return self._put("_source_location_excludes", [*self._source_location_excludes, *excludes])

    def _put(self, name: str, value: Any) -> Options:
        self.checkIsFrozen()
        object.__setattr__(self, name, value)
        return self

    def enableExecutableCaching(self, path: str | None) -> Options:
        """Keep compiled models in the folder ``path``; None switches this off."""
        self._Popart.set("enableEngineCaching", path is not None)
        self._Popart.set("cachePath", "" if path is None else str(path))
        return self

    @property
    def executable_cache(self) -> Path | None:
        """The folder of compiled models; None where they are not kept."""
        folder = self._Popart.options.get("cachePath")
        return Path(folder) if folder and self._Popart.options.get("enableEngineCaching") else None

    # -- from text ----------------------------------------------------------------------------

    def loadFromFile(self, filepath: str | Path) -> Options:
        """Apply a file of setter calls, one per line, without the ``options.`` prefix.

        Raises:
            ConfigFileError: a line is not a call that Python understands.
        """
        from_text.apply_lines(self, Path(filepath), self._names_in_files)
        return self

    def from_json(self, string: str) -> Options:
        """Apply ``{"Training.gradientAccumulation": 2, ...}``: dotted setters and arguments."""
        from_text.apply_json(self, string)
        return self

    def overlap_conditions(self, training: bool) -> OverlapConditions:
        """Return what these options say of overlapped I/O."""
        return OverlapConditions(
            is_pipelined=self._execution_strategy.is_pipelined,
            has_io_tiles=self.TensorLocations.exists("numIOTiles"),
            output_mode=self.resolved_output_mode(training),
        )

    # -- what the launcher decides ------------------------------------------------------------

    @property
    def shares_devices(self) -> bool:
        """Whether the launcher hands out the devices; otherwise a model waits for its id."""
        return False

    def check_ipus(self, needed: int) -> None:
        """Do nothing: a program on its own has as many IPUs for each replica as it asks for."""

    # -- the object as a whole ----------------------------------------------------------------

    def clone(self) -> Options:
        """Return an independent copy that is not frozen."""
        return copy.deepcopy(self)

    def toDict(self) -> dict[str, Any]:
        """Return all values of all groups as one flat dictionary.

        Raises:
            AssertionError: no output mode was chosen.
        """
        assert not self.defaultOutputMode(), (
            "An output mode must be picked before generating a dict"
        )
        values = dict(self._values)
        for group in self._groups().values():
            values.update(group.toDict())
        return values

    def _description(self) -> tuple[Any, ...]:
        """Return all that compiling depends on: equal for options that compile alike.

        Where executables are cached is left out, and so are the bar and the checks of optimisers.
        """
        return (
            *super()._description(),
            self._execution_strategy._description(),
            self._module_namescope_enabled,
        )


def _check_type(setter: str, value: Any, expected: Any) -> None:
    """Check the value of an option that has none to compare with before it is set."""
    assert isinstance(value, expected), (
        f"Unexpected type {type(value)} for {setter}({value!r}). Expected {expected}"
    )


def _output_mode(mode: enums.OutputMode, period: int | None) -> tuple[enums.OutputMode, int]:
    """Check an output mode and its period; return both as they are stored."""
    assert isinstance(mode, enums.OutputMode), f"Invalid output mode {mode!r}"
    if mode == enums.OutputMode.EveryN:
        every = period if isinstance(period, int) else 0
        assert every > 0, f"OutputMode.EveryN needs a positive output_return_period, got {period!r}"
        return mode, every
    if period is not None and period != 1:
        logger.info("output_return_period is ignored: the output mode is %s", mode.name)
    return mode, 1
