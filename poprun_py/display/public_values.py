"""The base class of public values that are shown as text and HTML, such as LaunchPlan."""

from __future__ import annotations

from typing import Any

# The module with the functions that draw values. It is imported by its name when a value is drawn,
# because it imports the classes of the values itself.
_VIEWS = "poprun_py.python_api.value_views"


def _views() -> Any:
    from importlib import import_module

    return import_module(_VIEWS)


def summary_of(result: object) -> str:
    """Return one sentence that says how a job ended."""
    summary: str = _views().summary_of(result)
    return summary


class Displayed:
    """The base class of values whose text (``str``) and HTML (in notebooks) come from the views."""

    __slots__ = ()

    def __str__(self) -> str:
        text: str = _views().text_of(self)
        return text

    def _repr_html_(self) -> str:
        html: str = _views().html_of(self)
        return html
