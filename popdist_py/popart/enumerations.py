"""The enumerations and small classes of PopART that PopTorch programs use.

For example, programs set a session option of PopART with the following call:
``opts._Popart.set("syntheticDataMode", int(popart.SyntheticDataMode.Zeros))``. The names and
numbers of the enumerations are the same as in PopART. ``popdist_py.poptorch`` documents which of
PopART's session options have an effect in this library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class SyntheticDataMode(IntEnum):
    """The kinds of synthetic data that can replace the host's data."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class ReductionType(IntEnum):
    """The ways to reduce the values of several micro-batches or replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """The moments when a sum of gradients is divided to get the mean."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class SyncPattern(IntEnum):
    """The patterns in which IPUs synchronise with each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class AnchorReturnTypeId(IntEnum):
    """Selects the micro-batches after which the value of a tensor is returned to the host."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


class RecomputationType(IntEnum):
    """The methods that choose which activations are recomputed and which ones are stored."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class RecomputeType(IntEnum):
    """Whether the result of one operation is recomputed or stored."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class VirtualGraphMode(IntEnum):
    """The methods that place operations on IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class SubgraphCopyingStrategy(IntEnum):
    """The moments when tensors are copied into and out of subgraphs."""

    OnEnterAndExit = 0
    JustInTime = 1


class MergeVarUpdateType(IntEnum):
    """The methods that choose which updates of variables are merged."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class BatchSerializationTransformContext(IntEnum):
    """The passes (forward or backward) in which a batch is computed in parts, one after another."""

    Fwd = 0
    Bwd = 1


class BatchSerializationMethod(IntEnum):
    """The methods that compute a batch in parts, one after another."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationBatchSchedule(IntEnum):
    """The possible orders in which the parts of a batch are computed."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class AccumulateOuterFragmentSchedule(IntEnum):
    """The possible orders of the weight updates after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class ExecutionPhaseIOSchedule(IntEnum):
    """The moments when the tensors of an execution phase are loaded."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(IntEnum):
    """The orders of the steps in an execution phase."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class GradientTensorTrackingMethod(IntEnum):
    """The methods that choose the gradients that automatic loss scaling observes."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class ExchangeStrategy(IntEnum):
    """The moments when IPUs exchange inputs and outputs with the host."""

    JustInTime = 0
    OverlapInnerLoop = 1
    OverlapLoops = 2
    OverlapStep = 3


class Instrumentation(IntEnum):
    """The loops for which PopART counts clock cycles."""

    Outer = 0
    Inner = 1


class PatternsLevel(IntEnum):
    """The predefined sets of graph patterns that can be enabled."""

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
    """The moments when a program attaches to its device."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(IntEnum):
    """The methods that choose one of several free devices."""

    First = 0
    Random = 1


class CommGroupType(IntEnum):
    """The ways to divide the replicas into groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Selects the replicas that return the value of a variable to the host."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class TensorStorage(IntEnum):
    """The kinds of memory that can hold a tensor."""

    OffChip = 0
    OnChip = 1


class TileSet(IntEnum):
    """The sets of tiles that can hold a tensor."""

    Compute = 0
    IO = 1


class ReplicatedTensorSharding(IntEnum):
    """Whether tensors are sharded over the replicas."""

    Off = 0
    On = 1


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The memory and the set of tiles that hold tensors of one kind, such as weights."""

    storage: TensorStorage = TensorStorage.OnChip
    loadTileSet: TileSet = TileSet.Compute
    storageTileSet: TileSet = TileSet.Compute
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off


@dataclass(frozen=True, slots=True)
class TensorLocationSettings:
    """Where tensors of one kind are stored.

    The location applies only to tensors with at least a given number of elements.
    """

    location: TensorLocation = field(default_factory=TensorLocation)
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192
