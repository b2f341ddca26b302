"""Import of a module by its name, where a value uses a module that imports the value's class."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def on_use(home: str) -> ModuleType:
    """Return the module ``poprun_py.<home>``, imported now if it was not."""
    return import_module(f"{__package__}.{home}")
