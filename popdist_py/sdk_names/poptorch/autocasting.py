"""PopTorch's automatic casts, under PopTorch's own name: every object is that of popdist_py."""

from popdist_py.poptorch.autocasting import *
from popdist_py.poptorch.autocasting import __all__
