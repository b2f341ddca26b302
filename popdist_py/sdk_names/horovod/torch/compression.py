"""How Horovod's gradients may be compressed: every object is that of popdist_py."""

from popdist_py.horovod.torch.compression import *
from popdist_py.horovod.torch.compression import __all__
