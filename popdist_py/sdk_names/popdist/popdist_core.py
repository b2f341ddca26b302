"""PopDist's native module, which some programs import, re-exported from popdist_py."""

from popdist_py.popdist_core import *
from popdist_py.popdist_core import __all__
