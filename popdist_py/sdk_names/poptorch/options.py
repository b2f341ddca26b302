"""PopTorch's options and their groups, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import options as _ours
from popdist_py.poptorch.options import *
from popdist_py.poptorch.options import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
