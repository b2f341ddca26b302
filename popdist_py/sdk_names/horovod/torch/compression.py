"""Horovod's compressors, imported from popdist_py."""

from popdist_py.horovod.torch.compression import *
from popdist_py.horovod.torch.compression import __all__
