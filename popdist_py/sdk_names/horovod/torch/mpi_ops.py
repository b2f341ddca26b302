"""Horovod's collectives, imported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.horovod.torch.mpi_ops import *

if not TYPE_CHECKING:
    from popdist_py.horovod.torch.mpi_ops import __all__
