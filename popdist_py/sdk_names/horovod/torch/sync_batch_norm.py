"""Horovod's SyncBatchNorm, imported from popdist_py."""

from popdist_py.horovod.torch.sync_batch_norm import *
from popdist_py.horovod.torch.sync_batch_norm import __all__
