"""Horovod's DistributedOptimizer: every object is that of popdist_py."""

from popdist_py.horovod.torch.optimizer import *
from popdist_py.horovod.torch.optimizer import __all__
