"""The base class of public values that are shown as text and HTML, such as LaunchPlan.

The functions that show a value are in ``poprun_py.python_api.value_views``. ``value_views`` imports
the classes of the values, so these classes cannot import ``value_views``. The root package, which
is always loaded, imports ``value_views`` when a value is shown.
"""

from __future__ import annotations

import sys
from typing import Any


def _views() -> Any:
    return sys.modules[__name__.partition(".")[0]]._load_views()


class Displayed:
    """The base class of values that ``value_views`` shows as text and, in notebooks, as HTML."""

    __slots__ = ()

    def __str__(self) -> str:
        text: str = _views().text_of(self)
        return text

    def _repr_html_(self) -> str:
        html: str = _views().html_of(self)
        return html


def summary_of(result: object) -> str:
    """Return one sentence that says how a job ended."""
    sentence: str = _views().summary_of(result)
    return sentence
