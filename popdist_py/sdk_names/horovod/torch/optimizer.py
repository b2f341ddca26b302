"""Horovod's DistributedOptimizer, imported from popdist_py."""

from popdist_py.horovod.torch.optimizer import *
from popdist_py.horovod.torch.optimizer import __all__
