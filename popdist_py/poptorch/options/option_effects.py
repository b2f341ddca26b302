"""The table of options, with the effect that each option has on emulated IPUs.

To add an option, write its setter, its row in the table of options' effects, and the code that
reads the option's value. If the table of options' effects says that an option does nothing, the
module ``options_without_effect`` logs a warning when a program sets the option. The methods that
read session options and engine options accept only names of options that have an effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

__all__ = ["ENGINE", "LOCATIONS", "SESSION", "STORED", "STRATEGY", "Effect", "Option"]


class Effect(Enum):
    """The effect of an option on emulated IPUs.

    Attributes:
        RESULTS: The option changes the results, errors, log lines or files of a program.
        DEVICE: The option changes only the emulated memory or the emulated time.
        HARDWARE: The option changes only the speed or the memory of real IPUs, not of emulated
            ones.
        NOTHING: The option requests a feature that this library does not have.
        UNLOGGED: The option does nothing, and no warning is logged for a program that sets it.
    """

    RESULTS = auto()
    DEVICE = auto()
    HARDWARE = auto()
    NOTHING = auto()
    UNLOGGED = auto()


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table of options' effects.

    Attributes:
        name: The name of the option, as programs write it.
        effect: The effect of the option on emulated IPUs.
        why: The reason why an option with the effect NOTHING or UNLOGGED does nothing.
        only: The only value of the option that the table row describes. ``only`` is None if the
            table row describes every value of the option.
    """

    name: str
    effect: Effect
    why: str = ""
    only: Any = None

    @property
    def acts(self) -> bool:
        """Whether the option changes results or the emulated memory and time."""
        return self.effect in (Effect.RESULTS, Effect.DEVICE)

    @property
    def is_idle(self) -> bool:
        """Whether a warning is logged for a program that sets the option."""
        return self.effect in (Effect.HARDWARE, Effect.NOTHING)

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def _session(effect: Effect, *names: str, why: str = "") -> dict[str, Option]:
    return {name: Option(f"_Popart {name}", effect, why) for name in names}


def _engine(effect: Effect, *names: str, why: str = "") -> dict[str, Option]:
    return {name: Option(f"engine option {name}", effect, why) for name in names}


def _named(effect: Effect, why: str = "", **names: str) -> dict[str, Option]:
    return {key: Option(name, effect, why) for key, name in names.items()}


# The effects of the options that the class ``Options`` and its groups store. The keys of the
# dictionary are the names of stored option values, or of private attributes of ``Options``.
STORED: Final = {
    **_named(
        Effect.RESULTS,
        accumulation_and_replication_reduction_type=(
            "Training.accumulationAndReplicationReductionType"
        ),
        anchored_tensors="anchorTensor",
        auto_round_num_ipus="autoRoundNumIPUs",
        broadcast_buffers="broadcastBuffers",
        connection_type="connectionType",
        deterministic_reduction="Emulator.deterministicReduction",
        device_iterations="deviceIterations",
        distributed_process_id="Distributed.configureProcessId",
        double_precision="Emulator.doublePrecision",
        gradient_accumulation="Training.gradientAccumulation",
        gradient_compression="Training.gradientCompression",
        input_cgt="inputReplicaGrouping",
        input_group_size="inputReplicaGrouping",
        ipu_id="useIpuId",
        # Every strategy for averaging gradients gives the same mean, but some optimisers accept
        # only one of the strategies.
        meanAccumulationAndReplicationReductionStrategy=(
            "Training.setMeanAccumulationAndReplicationReductionStrategy"
        ),
        memory="Emulator.memory",
        norm_group_size="Training.distributedBatchNormReplicaGroupSize",
        num_distributed_processes="Distributed.configureProcessId",
        output_mode="outputMode",
        output_return_period="outputMode",
        random_seed="randomSeed",
        replica_execution="Emulator.replicaExecution",
        replication_factor="replicationFactor",
        _execution_strategy="setExecutionStrategy",
        _module_namescope_enabled="disableModuleNamescope",
        _relax_optimizer_checks="relaxOptimizerAttributesChecks",
        _show_compilation_progress_bar="showCompilationProgressBar",
    ),
    **_named(
        Effect.DEVICE,
        available_memory_proportion="setAvailableMemoryProportion",
        device="Emulator.device",
        location_accumulator="TensorLocations.setAccumulatorLocation",
        location_activation="TensorLocations.setActivationLocation",
        location_optimizer="TensorLocations.setOptimizerLocation",
        location_weight="TensorLocations.setWeightLocation",
        numIOTiles="TensorLocations.numIOTiles",
        uses_ipu_model="useIpuModel",
    ),
    **_named(
        Effect.HARDWARE,
        model_name="modelName",
        sync_pattern="syncPattern",
        _source_location_excludes="sourceLocationExcludes",
    ),
    **_named(Effect.NOTHING, "the emulation does not write log files", log_dir="logDir"),
    **_named(Effect.NOTHING, "the log shows all repeated lines", max_repeat_logs="maxRepeatLogs"),
    # The call ``useIpuModel(True)`` has the effect that the table row ``uses_ipu_model`` describes.
    "use_model": Option(
        "useIpuModel(False)", Effect.NOTHING, "the emulation cannot use real IPUs", only=False
    ),
    **_named(
        Effect.UNLOGGED,
        "the setter logs that the option is deprecated",
        half_float_casting="Precision.halfFloatCasting",
        trace_model="Jit.traceModel",
    ),
    **_named(
        Effect.UNLOGGED, "the setter also sets Emulator.device", ipu_version="useOfflineIpuTarget"
    ),
    **_named(Effect.UNLOGGED, "no setter changes the value", ipuof_configs="ipuof_configs"),
}

# The effects of PopART's session options. If the value of a session option is a dictionary, each
# key of the dictionary has its own row in the table ``SESSION``. The name of the row for a
# dictionary's key consists of the name of the session option, a space, and the key. Session options
# that are not in the table ``SESSION`` affect only hardware.
SESSION: Final = {
    **_session(
        Effect.RESULTS,
        "automaticLossScalingSettings.binEdgeLocation",
        "automaticLossScalingSettings.enabled",
        "automaticLossScalingSettings.thresholdUpperCountProportion",
        "automaticLossScalingSettings.updatePeriod",
        "cachePath",
        "enableEngineCaching",
        "enableFloatingPointChecks",
        "enableStochasticRounding",
        "instrumentWithHardwareCycleCounter",
        "syntheticDataMode",
        "updatableNamedBuffers",
    ),
    **_session(
        Effect.DEVICE,
        "autoRecomputation",
        "convolutionOptions availableMemoryProportion",
        "convolutionOptions partialsType",
        "enablePipelining",
        "matmulOptions availableMemoryProportion",
        "partialsTypeMatMuls",
    ),
    "convolutionOptions enableConvDithering": Option(
        "Training.setConvolutionDithering", Effect.HARDWARE
    ),
    "enableStableNorm": Option("enableStableNorm", Effect.HARDWARE),
    **_session(
        Effect.NOTHING,
        "exportPoplarComputationGraph",
        "exportPoplarVertexGraph",
        "saveInitializersToFile",
        "serializedPoprithmsShiftGraphsDir",
        why="the emulation does not write this file",
    ),
    **_session(
        Effect.NOTHING,
        "compilationProgressLogger",
        "dotChecks",
        "dotOpNames",
        "hardwareInstrumentations",
        "timePartitionLogger",
        why="the emulation does not show this information",
    ),
    **_session(
        Effect.NOTHING,
        "accumulationAndReplicationReductionType",
        "accumulationFactor",
        "enableGradientAccumulation",
        "enableReplicatedGraphs",
        "globalReplicaOffset",
        "globalReplicationFactor",
        "meanAccumulationAndReplicationReductionStrategy",
        "numIOTiles",
        "replicatedGraphCount",
        why="use a setter of poptorch.Options instead",
    ),
}

# The effects of Poplar's engine options, which are the options of the class Engine. Engine options
# that are not in the table ``ENGINE`` affect only hardware.
ENGINE: Final = {
    **_engine(
        Effect.RESULTS,
        "autoReport.all",
        "autoReport.directory",
        "autoReport.outputArchive",
        "autoReport.outputDebugInfo",
        "autoReport.outputExecutionProfile",
        "autoReport.outputGraphProfile",
        "autoReport.outputLoweredVars",
        "autoReport.outputSerializedGraph",
        "debug.floatPointOpException",
        "debug.nanOverflowException",
    ),
    **_engine(
        Effect.UNLOGGED,
        "debug.allowOutOfMemory",
        why="the memory report of a model that does not fit is written in any case",
    ),
}

# The effects of the settings of ``TensorLocationSettings``, which choose the memory for tensors.
# The keys of ``LOCATIONS`` are the keys of the dictionaries that ``TensorLocationSettings`` stores.
LOCATIONS: Final = {
    **_named(
        Effect.DEVICE,
        onChip="TensorLocationSettings.useOnChipStorage",
        useReplicatedTensorSharding="TensorLocationSettings.useReplicatedTensorSharding",
        minElementsForOffChip="TensorLocationSettings.minElementsForOffChip",
        minElementsForReplicatedTensorSharding=(
            "TensorLocationSettings.minElementsForReplicatedTensorSharding"
        ),
    ),
    **_named(
        Effect.NOTHING,
        "emulated I/O tiles transfer data only from and to the host",
        useIOTilesToLoad="TensorLocationSettings.useIOTilesToLoad",
        useIOTilesToStore="TensorLocationSettings.useIOTilesToStore",
    ),
}

# The effects of the settings of execution strategies, which divide a model into stages. The keys of
# ``STRATEGY`` are names of attributes of execution strategies.
STRATEGY: Final = {
    **_named(Effect.DEVICE, _schedule="setSchedule"),
    **_named(
        Effect.NOTHING,
        "the emulation always runs the last forward phase and its backward pass as one phase",
        _separate_backward_phase="useSeparateBackwardPhase",
    ),
    **_named(
        Effect.NOTHING,
        "in the emulation, each phase loads its tensors and then sends them off the chip",
        _liveness="setTensorsLiveness",
        _off_chip_after_forward="sendTensorsOffChipAfterFwd",
    ),
}
