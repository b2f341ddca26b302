"""The base class of values with a text and an HTML form, such as LaunchPlan and LaunchResult.

The modules that draw a value import its class, so the class cannot import them. Instead, the root
package passes them to ``set_views`` when a program first uses the Python API. Before that, such as
in a process that only unpickled a result, the text of a value is its ``repr``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Views(Protocol):
    """The functions that draw values, as ``poprun_py.python_api.value_views`` has them."""

    def text_of(self, value: object) -> str:
        """Return the text of a value, which may have several lines."""

    def html_of(self, value: object) -> str:
        """Return the HTML of a value for a notebook."""

    def summary_of(self, result: Any) -> str:
        """Return one sentence that says how a job ended."""


_load_views: Callable[[], Views] | None = None


def set_views(load: Callable[[], Views]) -> None:
    """Let ``load`` return the views; it is called when a value is first drawn."""
    global _load_views
    _load_views = load


def summary_of(result: object) -> str:
    """Return one sentence that says how a job ended."""
    return repr(result) if _load_views is None else _load_views().summary_of(result)


class Displayed:
    """A value whose ``str``, and HTML in a notebook, are made by the views."""

    __slots__ = ()

    def __str__(self) -> str:
        return repr(self) if _load_views is None else _load_views().text_of(self)

    def _repr_html_(self) -> str | None:
        # IPython shows the repr in place of None.
        return None if _load_views is None else _load_views().html_of(self)
