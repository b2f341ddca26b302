"""PopART's names that PopTorch programs use, re-exported from popdist_py."""

from typing import TYPE_CHECKING

from popdist_py import popart as _ours
from popdist_py.popart import *
from popdist_py.popart import __all__

if not TYPE_CHECKING:

    def __getattr__(name):
        return getattr(_ours, name)
