"""Horovod's PyTorch API, imported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.horovod import torch as _ours
from popdist_py.horovod.torch import *
from popdist_py.horovod.torch import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
