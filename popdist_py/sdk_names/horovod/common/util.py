"""Horovod's helper functions, imported from popdist_py."""

from popdist_py.horovod.common.util import *
from popdist_py.horovod.common.util import __all__
