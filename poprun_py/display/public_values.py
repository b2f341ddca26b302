"""The base class of public values that are shown as text and HTML, such as LaunchPlan.

The views of a value are the functions that draw it. The views import the classes of the values, so
the values cannot import the views. Instead, the root package calls ``set_views``.
"""

from __future__ import annotations

# As in the root package, which imports this module: importing typing would delay each program.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Views(Protocol):
        """The functions of ``poprun_py.python_api.value_views`` that draw public values."""

        def text_of(self, value: object) -> str:
            """Return the text of a value, which may have several lines."""
            ...

        def html_of(self, value: object) -> str:
            """Return the HTML of a value for a notebook."""
            ...

        def summary_of(self, result: Any) -> str:
            """Return one sentence that says how a job ended."""
            ...


_load_views: Callable[[], Views]


def set_views(load: Callable[[], Views]) -> None:
    """Set the function that returns the views. It is called whenever a value is drawn."""
    global _load_views
    _load_views = load


class Displayed:
    """The base class of values whose text (``str``) and HTML (in notebooks) come from the views."""

    __slots__ = ()

    def __str__(self) -> str:
        return _load_views().text_of(self)

    def _repr_html_(self) -> str:
        return _load_views().html_of(self)


def summary_of(result: object) -> str:
    """Return one sentence that says how a job ended."""
    return _load_views().summary_of(result)
