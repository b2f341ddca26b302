"""What a value can do beyond itself: read from a file, be drawn. Found where it is first used.

A value stands below the rooms that read and draw it, and is made where their imports would cost
time, so it names them by text. Nothing else may: who calls whom stands in the imports.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def on_use(home: str) -> ModuleType:
    """Return the module ``poprun_py.<home>``, imported now if it was not."""
    return import_module(f"{__package__}.{home}")


class Shown:
    """A value that people read: its ``str`` and its HTML in a notebook are made by the views."""

    __slots__ = ()

    def __str__(self) -> str:
        text: str = on_use("python_api.views.values").text_of(self)
        return text

    def _repr_html_(self) -> str:
        html: str = on_use("python_api.views.values").html_of(self)
        return html
