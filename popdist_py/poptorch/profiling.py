"""Tracepoints of a program: accepted, and not recorded; the log says so once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from popdist_py import context
from popdist_py.poptorch.logger import logger

__all__ = ["Channel"]

Instrumented = TypeVar("Instrumented")


class Channel:
    """A named group of tracepoints. On emulated IPUs nothing records them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: Instrumented, *methods: Any) -> Instrumented:
        """Return ``obj``: its methods are not traced."""
        _say_nothing_is_recorded()
        return obj

    @contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Mark the enclosed code."""
        _say_nothing_is_recorded()
        yield


@cache
def _say_nothing_is_recorded() -> None:
    """Log once in a program, on instance 0, that tracepoints leave no trace."""
    if context.environment().instance_index == 0:
        logger.warning("profiling.Channel does nothing on emulated IPUs: no trace is recorded")
