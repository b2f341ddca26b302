"""The enumerations and small classes of PopART that PopTorch programs name.

Programs write ``opts._Popart.set("syntheticDataMode", int(popart.SyntheticDataMode.Zeros))``. Names
and numbers are PopART's. Which session options do something is said by ``popdist_py.poptorch``;
nothing here has a behaviour. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AnchorReturnTypeId",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "CommGroupType",
    "DeviceConnectionType",
    "DeviceSelectionCriterion",
    "DeviceType",
    "ExchangeStrategy",
    "ExecutionPhaseIOSchedule",
    "ExecutionPhaseSchedule",
    "GradientTensorTrackingMethod",
    "Instrumentation",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "PatternsLevel",
    "RecomputationType",
    "RecomputeType",
    "ReductionType",
    "ReplicatedTensorSharding",
    "SubgraphCopyingStrategy",
    "SyncPattern",
    "SyntheticDataMode",
    "TensorLocation",
    "TensorLocationSettings",
    "TensorStorage",
    "TileSet",
    "VariableRetrievalMode",
    "VirtualGraphMode",
]


class SyntheticDataMode(IntEnum):
    """What is computed on in place of the host's data."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class ReductionType(IntEnum):
    """How values of micro-batches or replicas are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean over gradient accumulation and replicas is divided."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(IntEnum):
    """How IPUs synchronise."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AnchorReturnTypeId(IntEnum):
    """Which micro-batches' values of a tensor return to the host."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


class RecomputationType(IntEnum):
    """Which activations are computed again in place of being kept."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class RecomputeType(IntEnum):
    """Whether one operation is computed again."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class VirtualGraphMode(IntEnum):
    """How operations are placed on IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class SubgraphCopyingStrategy(IntEnum):
    """When tensors are copied into and out of subgraphs."""

    OnEnterAndExit = 0
    JustInTime = 1


class MergeVarUpdateType(IntEnum):
    """Which updates of variables are merged."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class BatchSerializationTransformContext(IntEnum):
    """Where batches are serialised."""

    Fwd = 0
    Bwd = 1


class BatchSerializationMethod(IntEnum):
    """How batches are serialised."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationBatchSchedule(IntEnum):
    """In which order serialised batches are computed."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class AccumulateOuterFragmentSchedule(IntEnum):
    """In which order weights are updated after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class ExecutionPhaseIOSchedule(IntEnum):
    """When the tensors of a phase are loaded."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(IntEnum):
    """In which order the steps of phases come."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class GradientTensorTrackingMethod(IntEnum):
    """Which gradients automatic loss scaling looks at."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class ExchangeStrategy(IntEnum):
    """When inputs and outputs are exchanged with the host."""

    JustInTime = 0
    OverlapInnerLoop = 1
    OverlapLoops = 2
    OverlapStep = 3


class Instrumentation(IntEnum):
    """Which loops are counted in cycles."""

    Outer = 0
    Inner = 1


class PatternsLevel(IntEnum):
    """How many graph patterns are on."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class DeviceType(IntEnum):
    """Kinds of devices."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4


class DeviceConnectionType(IntEnum):
    """When a program attaches to its device."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(IntEnum):
    """Which of several devices is taken."""

    First = 0
    Random = 1


class CommGroupType(IntEnum):
    """Which replicas form a group."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Which replicas' values of a variable the host reads."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class TensorStorage(IntEnum):
    """Which memory holds a tensor."""

    OffChip = 0
    OnChip = 1


class TileSet(IntEnum):
    """Which tiles hold a tensor."""

    Compute = 0
    IO = 1


class ReplicatedTensorSharding(IntEnum):
    """Whether every replica holds a part of a tensor."""

    Off = 0
    On = 1


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where tensors of one kind are kept."""

    storage: TensorStorage = TensorStorage.OnChip
    loadTileSet: TileSet = TileSet.Compute
    storageTileSet: TileSet = TileSet.Compute
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass(frozen=True, slots=True)
class TensorLocationSettings:
    """Where tensors of one kind are kept, from which size on."""

    location: TensorLocation = field(default_factory=TensorLocation)
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192
