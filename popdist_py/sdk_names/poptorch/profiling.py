"""PopTorch's tracepoints under PopTorch's own name, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import profiling as _ours
from popdist_py.poptorch.profiling import *
from popdist_py.poptorch.profiling import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
