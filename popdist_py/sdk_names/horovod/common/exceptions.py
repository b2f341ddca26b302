"""Horovod's errors: every object is that of popdist_py."""

from popdist_py.horovod.common.exceptions import *
from popdist_py.horovod.common.exceptions import __all__
