"""PopTorch's operations under PopTorch's own name, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import ops as _ours
from popdist_py.poptorch.ops import *
from popdist_py.poptorch.ops import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
