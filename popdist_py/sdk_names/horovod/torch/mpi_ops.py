"""Horovod's collectives, imported from popdist_py."""

from popdist_py.horovod.torch.mpi_ops import *
from popdist_py.horovod.torch.mpi_ops import __all__
