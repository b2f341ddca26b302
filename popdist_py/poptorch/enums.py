"""The enumerations of the PopTorch API."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from popdist_py.poptorch import old_spellings

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


class OutputMode(IntEnum):
    """The micro-batches whose outputs a call of a model returns."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(IntEnum):
    """The operation, such as a sum, that combines values of several micro-batches or replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """The way to compute the mean of gradients over micro-batches and replicas."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Whether a data loader loads batches in the program's process or in another process."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """The way to start a data loader's process and to send the data set to the process."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class ConnectionType(IntEnum):
    """The time when a model attaches to its device: at once, at its first use, or never."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(IntEnum):
    """The method that IPUs use to wait for each other, which does not change a model's results."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class HalfFloatCastingBehavior(IntEnum):
    """The deprecated rules for operations that mix float16 and float32 tensors."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class Liveness(IntEnum):
    """The memory (on or off the IPU) for the tensors of a phase (model part) while others run."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(IntEnum):
    """The rule that assigns a model's blocks of operations to stages."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(IntEnum):
    """Whether the convolutions of a MultiConv run in parallel or in sequence."""

    Parallel = 0
    Serial = 1


class CommGroupType(IntEnum):
    """The rule that divides replicas into groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """The choice of replicas whose values of a variable are copied from the device to the host."""

    OnePerGroup = 0
    AllReplicas = 2


class MatMulSerializationMode(Enum):
    """The dimension along which a matrix product is split into parts."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(Enum):
    """The loop (if any) whose computation overlaps with the transfer of a tensor."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


# Type checkers do not see the function ``__getattr__``, because they would then accept every
# unknown name of the module.
if not TYPE_CHECKING:
    __getattr__ = old_spellings.module_names("poptorch.enums", __name__)
