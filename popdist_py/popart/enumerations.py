"""The enumerations and small classes of PopART that PopTorch programs name.

Programs write ``opts._Popart.set("syntheticDataMode", int(popart.SyntheticDataMode.Zeros))``. Names
and numbers are PopART's. ``popdist_py.poptorch`` documents the session options that have an effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class SyntheticDataMode(IntEnum):
    """The synthetic data that replaces the data of the host."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class ReductionType(IntEnum):
    """The reduction of values from several micro-batches or replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """The time of the division for a mean over gradient accumulation and replicas."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(IntEnum):
    """The pattern of the synchronisation of IPUs."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AnchorReturnTypeId(IntEnum):
    """The micro-batches whose values of a tensor return to the host."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


class RecomputationType(IntEnum):
    """The activations that are recomputed instead of stored."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class RecomputeType(IntEnum):
    """The choice for one operation between recomputation and storage."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class VirtualGraphMode(IntEnum):
    """The method that places operations on IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class SubgraphCopyingStrategy(IntEnum):
    """The time of the copies of tensors into and out of subgraphs."""

    OnEnterAndExit = 0
    JustInTime = 1


class MergeVarUpdateType(IntEnum):
    """The updates of variables that are merged."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class BatchSerializationTransformContext(IntEnum):
    """The forward or backward pass, whose batches are serialised."""

    Fwd = 0
    Bwd = 1


class BatchSerializationMethod(IntEnum):
    """The method that serialises batches."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationBatchSchedule(IntEnum):
    """The order of the computation of serialised batches."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class AccumulateOuterFragmentSchedule(IntEnum):
    """The order of the weight updates after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class ExecutionPhaseIOSchedule(IntEnum):
    """The time of loading the tensors of a phase."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(IntEnum):
    """The order of the steps of execution phases."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class GradientTensorTrackingMethod(IntEnum):
    """The gradients that automatic loss scaling observes."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class ExchangeStrategy(IntEnum):
    """The time of the exchange of inputs and outputs with the host."""

    JustInTime = 0
    OverlapInnerLoop = 1
    OverlapLoops = 2
    OverlapStep = 3


class Instrumentation(IntEnum):
    """The loops whose cycles are counted."""

    Outer = 0
    Inner = 1


class PatternsLevel(IntEnum):
    """The set of graph patterns that are enabled."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class DeviceType(IntEnum):
    """The kinds of devices."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4


class DeviceConnectionType(IntEnum):
    """The time of a program's attachment to its device."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(IntEnum):
    """The choice among several free devices."""

    First = 0
    Random = 1


class CommGroupType(IntEnum):
    """The division of the replicas into groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """The replicas whose values of a variable the host reads."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class TensorStorage(IntEnum):
    """The memory that holds a tensor."""

    OffChip = 0
    OnChip = 1


class TileSet(IntEnum):
    """The tiles that hold a tensor."""

    Compute = 0
    IO = 1


class ReplicatedTensorSharding(IntEnum):
    """The switch for the sharding of tensors over replicas."""

    Off = 0
    On = 1


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The memory and the tiles for tensors of one kind."""

    storage: TensorStorage = TensorStorage.OnChip
    loadTileSet: TileSet = TileSet.Compute
    storageTileSet: TileSet = TileSet.Compute
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass(frozen=True, slots=True)
class TensorLocationSettings:
    """The location of tensors of one kind, and the smallest sizes of tensors that it applies to."""

    location: TensorLocation = field(default_factory=TensorLocation)
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192
