"""PopDist under its own name, re-exported from popdist_py.

Each name of this package is imported at its first use. Importing this package imports neither torch
nor NumPy.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import popdist_py as _ours

if TYPE_CHECKING:
    # ``popdist_core`` and ``poptorch`` are modules of this package. These modules must be imported
    # before popdist_py's names, because popdist_py also has a module ``poptorch``.
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
