"""Horovod's PyTorch API, imported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.horovod import torch as _ours
from popdist_py.horovod.torch import *

if not TYPE_CHECKING:
    from popdist_py.horovod.torch import __all__

    def __getattr__(name):
        return getattr(_ours, name)
