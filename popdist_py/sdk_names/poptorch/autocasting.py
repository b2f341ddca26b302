"""PopTorch's automatic casts under PopTorch's own name, re-exported from popdist_py."""

from popdist_py.poptorch.autocasting import *
from popdist_py.poptorch.autocasting import __all__
