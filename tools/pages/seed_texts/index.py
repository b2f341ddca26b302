"""Which texts there are, in the order of the page."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from tools.pages.seed_texts.values import Figure, Text

__all__ = ["NAMES", "figures", "text", "texts"]

#: The modules of this package that hold a ``TEXT`` and ``FIGURES``.
NAMES: Sequence[str] = (
    "data_loading",
    "hands_on",
    "course_loading",
    "course_training",
    "pipelining",
    "cnns",
)


def text(name: str) -> Text:
    """Return the text of a module."""
    return importlib.import_module(f"tools.pages.seed_texts.{name}").TEXT


def texts() -> Mapping[str, Text]:
    """Return all texts by the names of their modules."""
    return {name: text(name) for name in NAMES}


def figures() -> Sequence[Figure]:
    """Return the figures of all texts."""
    modules = [importlib.import_module(f"tools.pages.seed_texts.{name}") for name in NAMES]
    return tuple(figure for module in modules for figure in module.FIGURES)
