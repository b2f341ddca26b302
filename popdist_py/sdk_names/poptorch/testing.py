"""PopTorch's helpers for tests under PopTorch's own name, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py.poptorch import testing as _ours
from popdist_py.poptorch.testing import *
from popdist_py.poptorch.testing import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
