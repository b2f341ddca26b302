"""PopDist's native module, from which some programs import: every object is that of popdist_py."""

from popdist_py.popdist_core import *
from popdist_py.popdist_core import __all__
