"""The names of PopART's session options, which ``Options._Popart.set`` accepts.

Few session options have an effect on emulated IPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from popdist_py.poptorch.errors import Error

__all__ = ["check"]

_KNOWN: Final = frozenset(
    {
        "accumulateOuterFragmentSettings",
        "accumulationAndReplicationReductionType",
        "accumulationFactor",
        "accumulatorTensorLocationSettings",
        "activationTensorLocationSettings",
        "aliasZeroCopy",
        "autoRecomputation",
        "autodiffSettings",
        "automaticLossScalingSettings",
        "batchSerializationSettings",
        "bufferingDepthMap",
        "cachePath",
        "collectivesNetworkSettings",
        "compilationProgressLogger",
        "compilationProgressTotal",
        "compileEngine",
        "constantFoldingOfConstantWeights",
        "constantWeights",
        "convolutionOptions",
        "createHaloRegions",
        "createImplicitPipeliningFwdOnlyProgram",
        "customCodeletCompileFlags",
        "customCodelets",
        "decomposeGradSum",
        "defaultBufferingDepth",
        "defaultPrefetchBufferingDepth",
        "delayVarUpdates",
        "developerSettings",
        "disableGradAccumulationTensorStreams",
        "disableOptimizerStateTensorStreams",
        "dotChecks",
        "dotOpNames",
        "enableConstantFoldingOfMultipleConsumers",
        "enableDistributedReplicatedGraphs",
        "enableEfficientOverlapIOTopoCons",
        "enableEngineCaching",
        "enableExplicitIR",
        "enableExplicitMainLoops",
        "enableFloatingPointChecks",
        "enableFullyConnectedPass",
        "enableGradientAccumulation",
        "enableInplaceAmbiguityChecking",
        "enableLoadAndOffloadRNGState",
        "enableMergeExchange",
        "enableNonStableSoftmax",
        "enableOutlining",
        "enableOutliningCopyCostPruning",
        "enablePipelining",
        "enablePrefetchDatastreams",
        "enableReplicatedGraphs",
        "enableRngStateManagement",
        "enableSerializedMatmuls",
        "enableStableNorm",
        "enableStochasticRounding",
        "enableSupportedDataTypeCasting",
        "enableVariablesCaching",
        "engineOptions",
        "ensureFp32LossScaleTensor",
        "executionPhaseSettings",
        "explicitPipeliningEnabled",
        "explicitRecomputation",
        "exportPoplarComputationGraph",
        "exportPoplarVertexGraph",
        "finalDotOp",
        "firstDotOp",
        "gclOptions",
        "globalReplicaOffset",
        "globalReplicationFactor",
        "groupHostSync",
        "groupNormOptions",
        "groupNormStridedChannelGrouping",
        "hardwareInstrumentations",
        "implicitPipeliningEnabled",
        "instrumentWithHardwareCycleCounter",
        "kahnTieBreaker",
        "logDir",
        "loosenThreshold",
        "lstmOptions",
        "matmulOptions",
        "meanAccumulationAndReplicationReductionStrategy",
        "mergeVarUpdate",
        "mergeVarUpdateMemThreshold",
        "numIOTiles",
        "optimizerStateTensorLocationSettings",
        "opxAliasChecking",
        "opxModifyChecking",
        "outlineSequenceBreakCost",
        "outlineThreshold",
        "outputInstructionsForEngines",
        "partialsTypeMatMuls",
        "patterns_level",
        "prefetchBufferingDepthMap",
        "rearrangeAnchorsOnHost",
        "rearrangeStreamsOnHost",
        "replicatedCollectivesSettings",
        "replicatedGraphCount",
        "reportOptions",
        "saveInitializersToFile",
        "scheduleNonWeightUpdateGradientConsumersEarly",
        "separateCallOpPdfs",
        "serializedPoprithmsShiftGraphsDir",
        "shouldDelayVarUpdates",
        "stashIoPaths",
        "strictOpVersions",
        "subgraphCopyingStrategy",
        "swapLimitScheduler",
        "syncPatterns",
        "syntheticDataMode",
        "tensorLocationSettingsOverride",
        "timeLimitScheduler",
        "timePartitionLogger",
        "transitiveClosureOptimizationThreshold",
        "updatableNamedBuffers",
        "useHostCopyOps",
        "useLoopCandidateCreator",
        "virtualGraphMode",
        "weightTensorLocationSettings",
    }
)


# The session options with dictionaries as values that this library reads.
_DICTIONARIES: Final = frozenset({"convolutionOptions", "engineOptions", "matmulOptions"})


def check(options: Mapping[str, Any]) -> None:
    """Check the names of session options, and the types of those that must be dictionaries.

    If a name contains dots, only the part before the first dot is checked.

    Raises:
        Error: A name is unknown, or a value that must be a dictionary is not a dictionary.
    """
    for name, value in options.items():
        stem = name.partition(".")[0]
        if stem not in _KNOWN and stem != "patterns":
            raise Error(f"Unknown session option {name!r} set with Options._Popart.set()")
        if name in _DICTIONARIES and not isinstance(value, Mapping):
            raise Error(f"Session option {name!r} is {value!r}: expected a dictionary of options")
