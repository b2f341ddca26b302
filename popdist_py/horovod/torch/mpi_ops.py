"""Horovod's collectives under the name of Horovod's module, ``horovod.torch.mpi_ops``."""

from __future__ import annotations

from popdist_py.horovod.common.exceptions import HorovodInternalError
from popdist_py.horovod.torch import (
    allgather_ops,
    allreduce_ops,
    alltoall_ops,
    broadcast_ops,
    reducescatter_ops,
)
from popdist_py.horovod.torch.allgather_ops import *
from popdist_py.horovod.torch.allreduce_ops import *
from popdist_py.horovod.torch.alltoall_ops import *
from popdist_py.horovod.torch.broadcast_ops import *
from popdist_py.horovod.torch.calls import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    barrier,
    join,
    poll,
    synchronize,
)
from popdist_py.horovod.torch.reducescatter_ops import *

__all__ = ["Adasum", "Average", "Handle", "HorovodInternalError", "Max", "Min", "Product"]
__all__ += ["ReduceOp", "Sum", "barrier", "join", "poll", "synchronize"]
__all__ += allgather_ops.__all__
__all__ += allreduce_ops.__all__
__all__ += alltoall_ops.__all__
__all__ += broadcast_ops.__all__
__all__ += reducescatter_ops.__all__
