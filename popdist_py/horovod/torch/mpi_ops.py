"""All collectives of Horovod, as Horovod exports them from ``horovod.torch.mpi_ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popdist_py.horovod.common.exceptions import HorovodInternalError as HorovodInternalError
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

# isort: off
from popdist_py.horovod.torch.calls import (
    Adasum as Adasum,
    Average as Average,
    Handle as Handle,
    Max as Max,
    Min as Min,
    Product as Product,
    ReduceOp as ReduceOp,
    Sum as Sum,
    barrier as barrier,
    join as join,
    poll as poll,
    synchronize as synchronize,
)

# isort: on
from popdist_py.horovod.torch.reducescatter_ops import *

if not TYPE_CHECKING:  # type checkers cannot add up these lists of names
    __all__ = ["Adasum", "Average", "Handle", "HorovodInternalError", "Max", "Min", "Product"]
    __all__ += ["ReduceOp", "Sum", "barrier", "join", "poll", "synchronize"]
    __all__ += allgather_ops.__all__
    __all__ += allreduce_ops.__all__
    __all__ += alltoall_ops.__all__
    __all__ += broadcast_ops.__all__
    __all__ += reducescatter_ops.__all__
