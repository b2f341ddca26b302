"""Tracepoints of a program: they do nothing here, as without PVTI on hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["Channel"]

Instrumented = TypeVar("Instrumented")


class Channel:
    """A named group of tracepoints."""

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: Instrumented, *methods: Any) -> Instrumented:
        """Return ``obj``: its methods are not traced."""
        return obj

    @contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Mark the enclosed code."""
        yield
