"""PopDist under its own name, re-exported from popdist_py.

As there, a name is imported at its first use: importing this imports neither torch nor NumPy.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import popdist_py as _ours

if TYPE_CHECKING:
    # First the modules of this package, which are not those of the same name in popdist_py.
    # isort: off
    from . import popdist_core as popdist_core
    from . import poptorch as poptorch
    from popdist_py import *  # type: ignore[no-redef]
    # isort: on

__all__ = [name for name in _ours.__all__ if not name.startswith("__")]  # type: ignore[attr-defined]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in ("popdist_core", "poptorch"):
            return import_module(f"{__name__}.{name}")
        value = getattr(_ours, name, None)
        if value is None or isinstance(value, ModuleType):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
