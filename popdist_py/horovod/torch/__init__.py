"""Horovod's PyTorch API, ``horovod.torch``, on the collectives of a job.

The modules have Horovod's names; ``basics`` is its ``horovod.common.basics``. What differs from
Horovod 0.28:

- Calls are matched by their order, which must be equal on all instances. Names are compared, and
  two different calls raise ``CollectiveMismatchError``, which is a ``HorovodInternalError`` here;
  Horovod would wait and warn.
- ``DistributedOptimizer`` keeps the state of the optimizer that it is given, and takes closures.
- ``join()`` returns where all instances join at the same step, and raises otherwise.
- Not here, refused with what to do instead: Adasum, process sets, elastic training, timelines.
- ``alltoall`` sends all rows to all, and ``broadcast_object`` takes what ``pickle`` takes.

torch is imported. Nothing here moves data: that is ``popdist_py.collectives``.
May call: activities, collectives, common, context, public_collectives, errors.
"""

from __future__ import annotations

from typing import Any

from popdist_py.horovod.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from popdist_py.horovod.torch.compression import Compression
from popdist_py.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from popdist_py.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from popdist_py.horovod.torch.optimizer import DistributedOptimizer
from popdist_py.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

# Horovod's names that have no counterpart here, each with what to do.
_NOT_HERE = {
    "elastic": "start the job with poprun-py --max-restarts N, and save checkpoints",
    "run": "start the program with poprun-py",
    "start_timeline": "leave the call out",
    "stop_timeline": "leave the call out",
    "ProcessSet": "use popdist_py.execute_on_instances() for some of the instances",
    "add_process_set": "use popdist_py.execute_on_instances() for some of the instances",
    "remove_process_set": "use popdist_py.execute_on_instances() for some of the instances",
}


def __getattr__(name: str) -> Any:
    if name in _NOT_HERE:
        raise AttributeError(f"Horovod's {name} is not available here: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
