"""Horovod's SyncBatchNorm: every object is that of popdist_py."""

from popdist_py.horovod.torch.sync_batch_norm import *
from popdist_py.horovod.torch.sync_batch_norm import __all__
