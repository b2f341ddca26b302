"""The PopTorch API on emulated IPUs, in plain PyTorch and with PopTorch's names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from popdist_py import __version__
from popdist_py.errors import require_package

require_package("torch", "popdist_py.poptorch", "torch torchvision")

# The import of ``popdist_thread_waiting`` must precede the import of torch, which loads the OpenMP
# runtime. The module ``popdist_thread_waiting`` sets the environment variable GOMP_SPINCOUNT, which
# the OpenMP runtime reads. If the program has imported torch already, the setting for the OpenMP
# runtime has no effect.
from popdist_py.start_hook import popdist_thread_waiting  # noqa: F401

# isort: split
from popdist_py.poptorch import (
    autocasting,
    enums,
    old_spellings,
    ops,
    optim,
    options,
    poptorch_core,
    profiling,
    testing,
    torch_ops,
)
from popdist_py.poptorch.calls.custom_type_parsers import ICustomArgParser, registerCustomArgParser
from popdist_py.poptorch.data.accessor import AsynchronousDataAccessor
from popdist_py.poptorch.data.dataloader import DataLoader
from popdist_py.poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from popdist_py.poptorch.errors import ConfigFileError, Error, RecoverableError, UnrecoverableError
from popdist_py.poptorch.logger import install_excepthook, logger, setLogLevel
from popdist_py.poptorch.model.compile_hooks import registerPostCompileHook, registerPreCompileHook
from popdist_py.poptorch.model.devices import ipuHardwareIsAvailable, ipuHardwareVersion
from popdist_py.poptorch.model.executor import PoplarExecutor
from popdist_py.poptorch.model.module_text import module_repr
from popdist_py.poptorch.model.module_text import print_module as print
from popdist_py.poptorch.model.wrap import inferenceModel, load, trainingModel
from popdist_py.poptorch.operators import torchvision_shim
from popdist_py.poptorch.operators.tensor_ids import getIpuTensorId
from popdist_py.poptorch.ops import (
    CPU,
    MultiConv,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    registerCustomOp,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from popdist_py.poptorch.options.launcher_options import DistributedOptions
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.tensor_locations import TensorLocationSettings
from popdist_py.poptorch.placement.annotations import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    NameScope,
    removeBlocks,
)
from popdist_py.poptorch.placement.execution_strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from popdist_py.poptorch.tracing.current_forward import is_running as isRunningOnIpu
from popdist_py.poptorch.tracing.losses import identity_loss

__all__ = [
    "CPU",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "DistributedOptions",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "autocasting",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerCustomOp",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]

torchvision_shim.define_when_imported()
torch_ops.install()
Options._names_in_files["poptorch"] = sys.modules[__name__]
install_excepthook()

# Type checkers do not see the function ``__getattr__``, because they would then accept every
# unknown name of the package.
if not TYPE_CHECKING:
    __getattr__ = old_spellings.module_names("poptorch", __name__)
