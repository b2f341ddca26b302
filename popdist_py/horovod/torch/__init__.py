"""Horovod's PyTorch API, ``horovod.torch``, implemented with the collectives of a job.

The modules have the same names as Horovod's modules, with two exceptions. ``basics`` corresponds to
``horovod.common.basics``, and the ``_ops`` modules are the parts of ``mpi_ops``. Differences from
Horovod 0.28:

- The calls of the instances are matched by their order, not by their names. All instances must
  therefore make their calls in the same order. The instances also compare the names of their calls.
- If the instances make different calls, the calls raise an error that is both a
  ``CollectiveMismatchError`` and a ``HorovodInternalError``. In this case, Horovod would wait and
  log a warning.
- ``DistributedOptimizer`` keeps the state of the given optimizer and accepts closures.
- ``join()`` returns if all instances call it at the same step, and otherwise raises an error.
- Using Adasum, process sets, elastic training or timelines raises an error that names a
  replacement.
- ``alltoall`` internally sends all rows to all instances.
- ``broadcast_object`` uses ``pickle``, so it accepts only objects that ``pickle`` accepts.

Importing this package imports torch. No module of this package communicates directly; the functions
of ``popdist_py.collectives`` do.
May call: activities, collectives, common, context, public_collectives, errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from popdist_py.errors import require_package

require_package("torch", "popdist_py.horovod.torch", "torch")

# isort: split
from popdist_py.horovod.torch import basics, functions, mpi_ops
from popdist_py.horovod.torch.basics import *
from popdist_py.horovod.torch.compression import Compression as Compression
from popdist_py.horovod.torch.functions import *
from popdist_py.horovod.torch.mpi_ops import *
from popdist_py.horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from popdist_py.horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

if not TYPE_CHECKING:  # type checkers cannot add up these lists
    __all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm"]
    __all__ += basics.__all__
    __all__ += functions.__all__
    __all__ += mpi_ops.__all__
    # ``horovod.torch`` does not export ``Handle`` and ``ReduceOp``. Programs import them from
    # ``mpi_ops``.
    __all__.remove("Handle")
    __all__.remove("ReduceOp")

_PROCESS_SETS = "to make calls on a subset of the ranks, use popdist_py.execute_on_instances()"
# Names in Horovod's API that this library does not have. Each name is mapped to advice on what to
# use instead.
_REPLACEMENTS = {
    "elastic": "start the job with poprun-py --max-restarts N, and save checkpoints",
    "run": "start the program with poprun-py",
    "start_timeline": "remove the call",
    "stop_timeline": "remove the call",
    "ProcessSet": _PROCESS_SETS,
    "add_process_set": _PROCESS_SETS,
    "remove_process_set": _PROCESS_SETS,
}


def __getattr__(name: str) -> Any:
    if name in _REPLACEMENTS:
        raise AttributeError(
            f"{name} of Horovod is not available in popdist_py: {_REPLACEMENTS[name]}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
