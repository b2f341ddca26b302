"""The base class of public values that are shown as text and HTML, such as LaunchPlan.

The functions that draw a value are in ``poprun_py.python_api.value_views``. That module imports the
classes of the values, so the values cannot import it. The root package, which is always loaded,
imports it when a value is drawn.
"""

from __future__ import annotations

import sys
from typing import Any


def _views() -> Any:
    return sys.modules[__name__.partition(".")[0]]._load_views()


class Displayed:
    """The base class of values whose text (``str``) and HTML (in notebooks) come from the views."""

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
