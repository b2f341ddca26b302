"""The base class of public values that are shown as text and HTML, such as LaunchPlan.

The views of a value are the functions that draw it. The modules of the views import the value's
class, so the class cannot import the views. Instead, the root package calls ``set_views`` when a
program first uses the Python API. Before the call of ``set_views``, the text of a value is its
``repr``, for example in a process that only unpickles a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Views(Protocol):
    """The functions of ``poprun_py.python_api.value_views`` that draw public values."""

    def text_of(self, value: object) -> str:
        """Return the text of a value, which may have several lines."""

    def html_of(self, value: object) -> str:
        """Return the HTML of a value for a notebook."""

    def summary_of(self, result: Any) -> str:
        """Return one sentence that says how a job ended."""


_load_views: Callable[[], Views] | None = None


def set_views(load: Callable[[], Views]) -> None:
    """Set the function that returns the views. It is called whenever a value is drawn."""
    global _load_views
    _load_views = load


def summary_of(result: object) -> str:
    """Return one sentence that says how a job ended."""
    return repr(result) if _load_views is None else _load_views().summary_of(result)


class Displayed:
    """The base class of values whose text (``str``) and HTML (in notebooks) come from the views."""

    __slots__ = ()

    def __str__(self) -> str:
        return repr(self) if _load_views is None else _load_views().text_of(self)

    def _repr_html_(self) -> str | None:
        # If this method returns None, IPython shows the value's ``repr``.
        return None if _load_views is None else _load_views().html_of(self)
