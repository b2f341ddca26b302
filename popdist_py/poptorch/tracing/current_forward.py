"""The forward that this thread runs: whether it is one of a wrapped model, and what watches it.

Wrappers and watches set the one variable of this module. Operators and annotations read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = [
    "Phase",
    "Watch",
    "current_watch",
    "entered",
    "is_running",
    "is_tracing",
    "is_training",
    "require_python",
    "watched_by",
]


class Watch(Protocol):
    """What this module knows of a ``ForwardWatch``; the modules of its parts import this module.

    Attributes:
        losses: A ``Losses``, or None.
        blocks: A ``BlockRecorder``, or None.
        overlap: An ``OverlapMarks``, or None.
        observer: An ``Observer``, or None.
        needs_python: Whether Python code of this forward has to run in every forward.
    """

    losses: Any
    blocks: Any
    overlap: Any
    observer: Any
    needs_python: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """What a wrapper does while it runs the user's forward.

    Attributes:
        training: Whether a backward pass follows.
        tracing: Whether this is the first forward, the one that compiles the model.
    """

    training: bool
    tracing: bool


@dataclass(frozen=True, slots=True)
class _CurrentForward:
    phase: Phase | None = None
    watch: Watch | None = None


_NO_FORWARD: Final = _CurrentForward()
# A thread that runs a part of a forward has a copy of the context of the thread that waits for it.
_current: Final[ContextVar[_CurrentForward]] = ContextVar("forward", default=_NO_FORWARD)


def is_running() -> bool:
    """Tell whether this code runs inside the forward of a wrapped model."""
    return _current.get().phase is not None


def is_training() -> bool:
    """Tell whether this code runs inside the forward of a training model."""
    phase = _current.get().phase
    return phase is not None and phase.training


def is_tracing() -> bool:
    """Tell whether this code runs inside the first forward, the one that compiles the model."""
    phase = _current.get().phase
    return phase is not None and phase.tracing


def current_watch() -> Watch | None:
    """Return the watch that follows this forward, or None."""
    return _current.get().watch


def require_python() -> None:
    """Say that Python code of this forward has to run in every forward."""
    watch = current_watch()
    if watch is not None:
        watch.needs_python = True


@contextmanager
def entered(phase: Phase) -> Iterator[None]:
    """Mark the enclosed code as the forward of a wrapped model."""
    token = _current.set(_CurrentForward(phase, _current.get().watch))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Let ``watch`` be the current watch of the enclosed code."""
    token = _current.set(_CurrentForward(_current.get().phase, watch))
    try:
        yield
    finally:
        _current.reset(token)
