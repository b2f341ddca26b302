"""The class ``Options``, whose values control how a program's models run."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from popdist_py.popart import SyntheticDataMode
from popdist_py.poptorch import enums, old_spellings
from popdist_py.poptorch.calls.batching import Batching, check_groups, check_output_mode
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options import from_text
from popdist_py.poptorch.options.device_choice import offline_ipu
from popdist_py.poptorch.options.emulator_options import _EmulatorOptions
from popdist_py.poptorch.options.groups import _DistributedOptions, _JitOptions, _PrecisionOptions
from popdist_py.poptorch.options.session import _PopartOptions
from popdist_py.poptorch.options.store import OptionStore, check_count, check_type
from popdist_py.poptorch.options.tensor_locations import _TensorLocationOptions
from popdist_py.poptorch.options.training_options import _TrainingOptions
from popdist_py.poptorch.placement import execution_strategies
from popdist_py.poptorch.tracing.operator_limits import proportions_of_ipus
from popdist_py.poptorch.tracing.overlapped_io import OverlapConditions

__all__ = ["Options"]

_UNLIMITED: Final = 2**64 - 1


class Options(OptionStore):
    """The settings that control how models and data loaders run.

    Setters return the ``Options`` object, so a program can chain calls of setters. A data loader or
    a model freezes the options that it uses, so that later changes raise an error.
    ``Options(ipus_per_replica=n)`` makes a :class:`DistributedOptions`, because the names
    ``popdist.poptorch.Options`` and ``poptorch.Options`` refer to one class.
    """

    Training: _TrainingOptions
    Precision: _PrecisionOptions
    TensorLocations: _TensorLocationOptions
    Distributed: _DistributedOptions
    Jit: _JitOptions
    Emulator: _EmulatorOptions
    _Popart: _PopartOptions

    _place = "Options"

    # The subclass that ``Options(ipus_per_replica=n)`` makes, set by ``launcher_options.py``.
    _for_launcher: ClassVar[type[Options]]
    # The names that a file for ``loadFromFile`` may use in addition to setters. The package
    # ``poptorch`` adds its own name to the dictionary ``_names_in_files``.
    _names_in_files: ClassVar[dict[str, Any]] = {}

    def __new__(cls, *_: Any, **arguments: Any) -> Options:
        """Make an ``Options``, or a ``DistributedOptions`` for the argument ``ipus_per_replica``.

        PopDist and PopTorch each have a class ``Options``. Only PopDist's ``Options`` has the
        argument ``ipus_per_replica``, so this argument selects PopDist's ``Options``.
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
        """Apply the option values that environment variables set for every new object."""
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            self.from_json(defaults)
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            logger.info("POPTORCH_CACHE_DIR is set, so compiled models are cached in %s", cache)
            self.enableExecutableCaching(cache)

    # -- Setters for the division of input into batches ---------------------------------------

    def _check(self) -> None:
        check_count("deviceIterations", self.device_iterations)
        check_count("replicationFactor", self.replication_factor)
        check_groups(self.replication_factor, self.input_group_size, self.input_cgt)

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set the number of iterations (DI) per call of a model: weight updates or inferences."""
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas (R), the copies of the model that this process runs.

        Raises:
            ValueError: The number of replicas is not divisible by inputReplicaGrouping()'s size.
        """
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(
        self, input_group_size: int, input_cgt: enums.CommGroupType
    ) -> Options:
        """Give the same input to all replicas of a group of ``input_group_size`` replicas.

        Call ``replicationFactor()`` before ``inputReplicaGrouping()``.

        Raises:
            ValueError: ``input_cgt`` is All, or ``input_group_size`` does not divide the number of
                replicas.
        """
        if input_cgt == enums.CommGroupType.NoGrouping:
            input_group_size, input_cgt = 1, enums.CommGroupType.Consecutive
        self.set(input_group_size=input_group_size, input_cgt=input_cgt)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Declare that buffers are equal on all replicas, or keep one copy for each replica.

        Each replica always has its own statistics of batch norms and instance norms.

        Args:
            broadcast_buffers: Whether buffers are equal on all replicas.
        """
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    @old_spellings.takes("Options.outputMode()")
    def outputMode(
        self, output_mode: enums.OutputMode, output_return_period: int | None = None
    ) -> Options:
        """Choose which micro-batches' outputs a call of the model returns.

        Args:
            output_mode: The output mode, which is All, Final, Sum, EveryN or Default. The output
                mode Default means All for an inference model and Final for a training model.
            output_return_period: The N of the output mode EveryN (outputs of every Nth
                micro-batch). Other output modes ignore ``output_return_period``.
        """
        mode, period = check_output_mode(output_mode, output_return_period)
        self.set(output_mode=mode, output_return_period=period)
        return self

    def defaultOutputMode(self) -> bool:
        """Tell whether the program has not chosen which micro-batches' outputs a call returns."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def resolved_output_mode(self, training: bool) -> enums.OutputMode:
        """Return the chosen or default output mode: which micro-batches' outputs a call returns."""
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
        """Make a tensor inside the model readable by the program after each call of the model.

        Args:
            short_name: The name that the program uses to read the tensor.
            long_name: The name of the tensor in the model.
            output_mode: The choice of micro-batches whose tensors are returned. By default,
                ``output_mode`` selects the same micro-batches as for the model's outputs.
            output_return_period: The N of the output mode EveryN, which selects every Nth
                micro-batch.
        """
        self.checkIsFrozen()
        if output_mode is None:
            entry: list[Any] = [long_name, True]
        else:
            mode, period = check_output_mode(output_mode, output_return_period)
            entry = [long_name, False, mode, period]
        self._values["anchored_tensors"][short_name] = entry

    def batching(self, training: bool) -> Batching:
        """Return a model's numbers of micro-batches and replicas, and its output mode."""
        return Batching(
            device_iterations=self.device_iterations,
            gradient_accumulation=self.Training.gradient_accumulation,
            replicas=self.replication_factor,
            group_size=self.input_group_size,
            group_type=self.input_cgt,
            output_mode=self.resolved_output_mode(training),
            output_period=self.output_return_period,
        )

    # -- Setters for the execution of models --------------------------------------------------

    def randomSeed(self, random_seed: int) -> Options:
        """Set the seed of the device's random number generators and of torch's generator."""
        assert isinstance(random_seed, int), (
            f"randomSeed({random_seed!r}) is not valid: expected an integer"
        )
        self.createOrSet(random_seed=random_seed)
        torch.manual_seed(random_seed)
        return self

    def setExecutionStrategy(self, strategy: Any) -> Options:
        """Choose the execution strategy, which assigns the blocks of a model to stages and IPUs."""
        if isinstance(strategy, enums.AutoStage):
            strategy = execution_strategies.PipelinedExecution(strategy)
        assert isinstance(strategy, execution_strategies._IExecutionStrategy), (
            f"setExecutionStrategy() got an object of the type {type(strategy).__name__}: "
            "expected an execution strategy, such as poptorch.PipelinedExecution or "
            "poptorch.ShardedExecution"
        )
        self.checkIsFrozen()
        object.__setattr__(self, "_execution_strategy", strategy)
        return self

    def setAvailableMemoryProportion(
        self, available_memory_proportion: Mapping[str, float]
    ) -> Options:
        """Set the share of IPU memory that one operator may use, such as ``{"IPU0": 0.5}``.

        Raises:
            AssertionError: A key is not the name of an IPU, or a share is not between 0 and 1.
        """
        proportions = proportions_of_ipus(available_memory_proportion)
        self.set(available_memory_proportion=proportions)
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Round a model's number of IPUs up to a power of two instead of raising an error."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def enableStableNorm(self, enabled: bool) -> Options:
        """Request the numerically stable form of group norms, which torch uses in any case."""
        self._Popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Generate the model's inputs on the device, and return zeros instead of its outputs.

        Generated inputs with a floating-point type are random numbers with a normal distribution.
        Generated inputs with an integer type are zeros. The model's outputs have their usual shapes
        but contain zeros. The call ``_Popart.set("syntheticDataMode", mode)`` chooses other inputs
        than random numbers.
        """
        mode = SyntheticDataMode.RandomNormal if enabled else SyntheticDataMode.Off
        self._Popart.set("syntheticDataMode", int(mode))
        return self

    @property
    def synthetic_data(self) -> bool:
        """Whether the device generates the inputs of models itself."""
        return bool(self._Popart.session_value("syntheticDataMode"))

    @property
    def synthetic_mode(self) -> SyntheticDataMode:
        """The kind of inputs (zeros or random numbers) that the device generates.

        Raises:
            Error: The session option ``syntheticDataMode`` has an unknown value.
        """
        return self._Popart.session_member(
            "syntheticDataMode", SyntheticDataMode, SyntheticDataMode.Off
        )

    def updatableNamedBuffers(self, buffers: list[str]) -> Options:
        """Set the names of the buffers that copyNamedBuffersToDevice() copies to the device."""
        self._Popart.set("updatableNamedBuffers", list(buffers))
        return self

    @property
    def updatable_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that copyNamedBuffersToDevice() copies to the device."""
        return tuple(self._Popart.session_value("updatableNamedBuffers", ()))

    # -- Setters for the device ---------------------------------------------------------------

    def useIpuModel(self, use_model: bool) -> Options:
        """Emulate the memory and the time of an IPU, by default of an Mk2.

        The setter ``Emulator.device`` chooses another IPU than an Mk2. The environment variable
        ``POPTORCH_IPU_MODEL_VERSION`` (``ipu1``, ``ipu2`` or ``ipu21``) changes the default IPU.
        ``useIpuModel`` does not change results, because computations are always emulated.
        """
        check_type("useIpuModel", use_model, bool)
        self.createOrSet(use_model=use_model)
        self.Emulator._use_model(use_model)
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        """Attach models to the IPU device with the number ``ipu_id``."""
        check_type("useIpuId", ipu_id, int)
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self, ipu_target_version: int = 2) -> Options:
        """Compile without a device, for IPU version 1 (Mk1), 2 (Mk2) or 21 (Bow)."""
        ipu = offline_ipu(ipu_target_version)
        self.set(connection_type=enums.ConnectionType.Never)
        self.Emulator.device(ipu)
        self.createOrSet(ipu_version=ipu_target_version)
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        """Choose when a model attaches to (reserves) its IPU device."""
        assert isinstance(connection_type, enums.ConnectionType), (
            f"connectionType({connection_type!r}) is not valid: expected a poptorch.ConnectionType"
        )
        self.set(connection_type=connection_type)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        """Choose how IPUs synchronise. The option ``syncPattern`` does not change results."""
        assert isinstance(sync_pattern, enums.SyncPattern), (
            f"syncPattern({sync_pattern!r}) is not valid: expected a poptorch.SyncPattern"
        )
        self.set(sync_pattern=sync_pattern)
        return self

    # -- Setters for logs, reports and caches -------------------------------------------------

    def logDir(self, log_dir: str | Path) -> Options:
        """Set the folder for log files. The emulation does not write any log files."""
        check_type("logDir", log_dir, str | Path)
        self.set(log_dir=str(log_dir))
        return self

    def maxRepeatLogs(self, max_repeat_lines: int | None) -> Options:
        """Limit how often the same line is logged. The emulation ignores the limit.

        Args:
            max_repeat_lines: The limit for repetitions of a log line, or None for no limit.
        """
        self.set(max_repeat_logs=_UNLIMITED if max_repeat_lines is None else max_repeat_lines)
        return self

    def modelName(self, name: str) -> Options:
        """Set the name of the folder for model reports, which the emulation does not write."""
        check_type("modelName", name, str)
        self.createOrSet(model_name=name)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Count and log the IPU's clock cycles in each call of a model."""
        self._Popart.set("instrumentWithHardwareCycleCounter", bool(log_cycle_count))
        return self

    @property
    def counts_cycles(self) -> bool:
        """Whether the IPU's clock cycles in each call of a model are counted."""
        return bool(self._Popart.session_value("instrumentWithHardwareCycleCounter"))

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        """Record a timeline of this process, and write it to a file when the program ends.

        Args:
            profile_dir: The folder for the timeline's file; by default the current folder.
        """
        wanted = {"autoReport.all": "true", "debug.allowOutOfMemory": "true"}
        if profile_dir is not None:
            wanted["autoReport.directory"] = str(profile_dir)
        self._Popart.update("engineOptions", from_text.engine_options(wanted))
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Show the progress bar "Graph compilation", which ``compilationTime()`` requires."""
        return self._put("_show_compilation_progress_bar", bool(show))

    def disableModuleNamescope(self) -> Options:
        """Do not use the names of torch modules as prefixes of the names of operations."""
        return self._put("_module_namescope_enabled", False)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Log unexpected attributes of optimisers at the level DEBUG instead of WARN."""
        return self._put("_relax_optimizer_checks", bool(relax))

    def sourceLocationExcludes(self, excludes: Iterable[str]) -> Options:
        """Set which source locations are left out of the reports of real IPUs."""
        return self._put("_source_location_excludes", list(excludes))

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Add source locations to leave out of the reports of real IPUs."""
        return self._put("_source_location_excludes", [*self._source_location_excludes, *excludes])

    def _put(self, name: str, value: Any) -> Options:
        self.checkIsFrozen()
        object.__setattr__(self, name, value)
        return self

    def enableExecutableCaching(self, path: str | None) -> Options:
        """Store compiled models in the folder ``path``; None means that they are not stored."""
        self._Popart.set("enableEngineCaching", path is not None)
        self._Popart.set("cachePath", "" if path is None else str(path))
        return self

    @property
    def executable_cache(self) -> Path | None:
        """The folder that stores compiled models, or None if they are not stored."""
        folder = self._Popart.session_value("cachePath")
        is_on = self._Popart.session_value("enableEngineCaching")
        return Path(folder) if folder and is_on else None

    # -- Options from files and JSON texts ----------------------------------------------------

    def loadFromFile(self, filepath: str | Path) -> Options:
        """Run a file with one setter call on each line, such as ``deviceIterations(4)``.

        Raises:
            ConfigFileError: A line of the file is not valid Python.
        """
        from_text.apply_lines(self, Path(filepath), self._names_in_files)
        return self

    def from_json(self, string: str) -> Options:
        """Apply setter calls from JSON such as ``{"Training.gradientAccumulation": 2, ...}``."""
        from_text.apply_json(self, string)
        return self

    def overlap_conditions(self, training: bool) -> OverlapConditions:
        """Return the option values that decide whether input and output may overlap computation."""
        return OverlapConditions(
            is_pipelined=self._execution_strategy.is_pipelined,
            has_io_tiles=self.TensorLocations.exists("numIOTiles"),
            output_mode=self.resolved_output_mode(training),
        )

    # -- Values that the launcher sets in DistributedOptions ----------------------------------

    @property
    def shares_devices(self) -> bool:
        """Whether the launcher assigns devices, so that a model need not wait for a device."""
        return False

    def check_ipus(self, needed: int) -> None:
        """Do nothing: a program that runs without the launcher has as many IPUs as it needs."""

    # -- Copies and comparisons of Options objects --------------------------------------------

    def clone(self) -> Options:
        """Return an independent copy of the options, which is not frozen and can be changed."""
        return copy.deepcopy(self)

    def toDict(self) -> dict[str, Any]:
        """Return the values of all groups of options as one flat dictionary.

        Raises:
            AssertionError: The program has not chosen an output mode.
        """
        assert not self.defaultOutputMode(), (
            "An output mode must be picked before generating a dict: call outputMode() before "
            "toDict()"
        )
        values = dict(self._values)
        for group in self._groups().values():
            values.update(group.toDict())
        return values

    def _description(self) -> tuple[Any, ...]:
        """Return the option values that compiled models depend on.

        Compiled models do not depend on the folder of cached executables, the progress bar and the
        checks of optimisers.
        """
        return (
            *super()._description(),
            self._execution_strategy._description(),
            self._module_namescope_enabled,
        )
