"""Where the program is: inside a wrapper's forward, training or not, tracing or not.

One thread-local value and who may read it; wrappers set it, operators and annotations read it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = [
    "Phase",
    "entered",
    "is_running",
    "is_tracing",
    "is_training",
    "require_python",
    "take_python_required",
]


@dataclass(frozen=True, slots=True)
class Phase:
    """What a wrapper is doing while it runs the user's forward."""

    training: bool
    tracing: bool


class _Where(threading.local):
    phase: Phase | None = None
    python_required: bool = False


_where = _Where()


def is_running() -> bool:
    """Tell whether this code runs inside the forward of a wrapped model."""
    return _where.phase is not None


def is_training() -> bool:
    """Tell whether this code runs inside the forward of a training model."""
    return _where.phase is not None and _where.phase.training


def is_tracing() -> bool:
    """Tell whether this is the first forward, the one that compiles the model."""
    return _where.phase is not None and _where.phase.tracing


def require_python() -> None:
    """Say that this forward does something in Python that every run has to do again."""
    _where.python_required = True


def take_python_required() -> bool:
    """Return whether ``require_python()`` was called since this was last asked."""
    required, _where.python_required = _where.python_required, False
    return required


@contextmanager
def entered(phase: Phase) -> Iterator[None]:
    """Mark the enclosed code as a wrapper's forward."""
    previous, _where.phase = _where.phase, phase
    try:
        yield
    finally:
        _where.phase = previous
