"""PopART's enumerations and devices, which are the parts of PopART that PopTorch programs use.

No module of this package builds graphs or runs PopART sessions.
May call: pods, pods.model, device_numbers, context, ipu, errors.
"""

from typing import NoReturn

from popdist_py.popart.device_manager import DeviceInfo, DeviceManager, popart_exception
from popdist_py.popart.enumerations import (
    AccumulateOuterFragmentSchedule,
    AnchorReturnTypeId,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    CommGroupType,
    DeviceConnectionType,
    DeviceSelectionCriterion,
    DeviceType,
    ExchangeStrategy,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    GradientTensorTrackingMethod,
    Instrumentation,
    MeanReductionStrategy,
    MergeVarUpdateType,
    PatternsLevel,
    RecomputationType,
    RecomputeType,
    ReductionType,
    ReplicatedTensorSharding,
    SubgraphCopyingStrategy,
    SyncPattern,
    SyntheticDataMode,
    TensorLocation,
    TensorLocationSettings,
    TensorStorage,
    TileSet,
    VariableRetrievalMode,
    VirtualGraphMode,
)

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AnchorReturnTypeId",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "CommGroupType",
    "DeviceConnectionType",
    "DeviceInfo",
    "DeviceManager",
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
    "popart_exception",
]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"popart.{name} is not available, because this package contains only PopART's devices and "
        "the values for Options._Popart.set(): write the model in PyTorch, and wrap the model with "
        "poptorch"
    )
