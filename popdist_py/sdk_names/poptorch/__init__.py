"""PopTorch on emulated IPUs under PopTorch's own name, re-exported from popdist_py."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from popdist_py import poptorch as _ours
from popdist_py.poptorch import *
from popdist_py.poptorch import __all__, __version__

# Importing these modules makes them attributes of this package. They take the place of the
# popdist_py.poptorch modules that have the same names.
for _name in (
    "autocasting",
    "enums",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "profiling",
    "testing",
):
    import_module(f"{__name__}.{_name}")

if not TYPE_CHECKING:

    def __getattr__(name):
        # Programs may use undocumented names, such as earlier spellings. This function does not
        # return modules of popdist_py.poptorch.
        try:
            value = getattr(_ours, name)
        except AttributeError as error:
            raise AttributeError(str(error).replace(_ours.__name__, __name__)) from None
        if isinstance(value, ModuleType):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return value
