"""Horovod's errors, imported from popdist_py."""

from popdist_py.horovod.common.exceptions import *
from popdist_py.horovod.common.exceptions import __all__
