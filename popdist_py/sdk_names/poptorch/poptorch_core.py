"""The exceptions of PopTorch's native module, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import poptorch_core as _ours
from popdist_py.poptorch.poptorch_core import *
from popdist_py.poptorch.poptorch_core import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
