"""Horovod's small helpers: every object is that of popdist_py."""

from popdist_py.horovod.common.util import *
from popdist_py.horovod.common.util import __all__
