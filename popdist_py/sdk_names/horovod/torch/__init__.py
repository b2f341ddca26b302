"""Horovod's PyTorch API, imported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.horovod import torch as _ours
from popdist_py.horovod.torch import *
from popdist_py.horovod.torch import __all__

if TYPE_CHECKING:  # type checkers cannot read a list of names that is added up
    from popdist_py.horovod.torch.allgather_ops import *
    from popdist_py.horovod.torch.allreduce_ops import *
    from popdist_py.horovod.torch.alltoall_ops import *
    from popdist_py.horovod.torch.basics import *
    from popdist_py.horovod.torch.broadcast_ops import *
    from popdist_py.horovod.torch.calls import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        barrier,
        join,
        poll,
        synchronize,
    )
    from popdist_py.horovod.torch.functions import *
    from popdist_py.horovod.torch.reducescatter_ops import *
else:

    def __getattr__(name):
        return getattr(_ours, name)
