"""PopTorch's enumerations under PopTorch's own name, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import enums as _ours
from popdist_py.poptorch.enums import *
from popdist_py.poptorch.enums import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
