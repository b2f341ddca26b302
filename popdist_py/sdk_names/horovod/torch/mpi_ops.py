"""Horovod's collectives: every object is that of popdist_py."""

from popdist_py.horovod.torch.mpi_ops import *
from popdist_py.horovod.torch.mpi_ops import __all__
