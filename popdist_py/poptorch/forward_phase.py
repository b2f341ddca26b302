"""Where the program is: inside a wrapper's forward, training or not, tracing or not.

One value of this context and who may read it; wrappers set it, operators and annotations read it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


class _Required(threading.local):
    python: bool = False


_required = _Required()
# Threads that run a part of a forward have the context of the one that waits for them.
_phase: ContextVar[Phase | None] = ContextVar("phase", default=None)


def is_running() -> bool:
    """Tell whether this code runs inside the forward of a wrapped model."""
    return _phase.get() is not None


def is_training() -> bool:
    """Tell whether this code runs inside the forward of a training model."""
    phase = _phase.get()
    return phase is not None and phase.training


def is_tracing() -> bool:
    """Tell whether this is the first forward, the one that compiles the model."""
    phase = _phase.get()
    return phase is not None and phase.tracing


def require_python() -> None:
    """Say that this forward does something in Python that every run has to do again."""
    _required.python = True


def take_python_required() -> bool:
    """Return whether ``require_python()`` was called since this was last asked."""
    required, _required.python = _required.python, False
    return required


@contextmanager
def entered(phase: Phase) -> Iterator[None]:
    """Mark the enclosed code as a wrapper's forward."""
    token = _phase.set(phase)
    try:
        yield
    finally:
        _phase.reset(token)
