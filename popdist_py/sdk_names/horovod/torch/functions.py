"""Horovod's broadcasts of parameters and objects, imported from popdist_py."""

from popdist_py.horovod.torch.functions import *
from popdist_py.horovod.torch.functions import __all__
