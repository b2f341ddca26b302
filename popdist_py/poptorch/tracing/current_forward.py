"""The forward of a wrapped model that the current thread runs, in a context variable.

The model wrappers and ``ForwardWatch`` set the context variable. Operators and annotations read the
context variable.
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
    """The attributes of a ``ForwardWatch``.

    The class ``ForwardWatch`` cannot be imported here, because its module imports this module.

    Attributes:
        losses: The ``Losses`` of the forward; None if losses are not recorded.
        blocks: The ``BlockRecorder`` of the forward; None if blocks are not recorded.
        overlap: The ``OverlapMarks`` of the forward; None if marks are not recorded.
        observer: The ``Observer`` of the forward; None if operations are not recorded.
        needs_python: Whether Python code of this forward has to run in every forward.
    """

    losses: Any
    blocks: Any
    overlap: Any
    observer: Any
    needs_python: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """The state of a model wrapper while it runs the user's forward.

    Attributes:
        training: Whether a backward pass follows the forward.
        tracing: Whether this is the first forward, which compiles the model.
    """

    training: bool
    tracing: bool


@dataclass(frozen=True, slots=True)
class _CurrentForward:
    phase: Phase | None = None
    watch: Watch | None = None


_NO_FORWARD: Final = _CurrentForward()
# A forward may run in several threads. Each thread has a copy of the context of the thread that
# started the forward.
_current: Final[ContextVar[_CurrentForward]] = ContextVar("forward", default=_NO_FORWARD)


def is_running() -> bool:
    """Tell whether this code runs inside the forward of a wrapped model."""
    return _current.get().phase is not None


def is_training() -> bool:
    """Tell whether this code runs inside the forward of a training model."""
    phase = _current.get().phase
    return phase is not None and phase.training


def is_tracing() -> bool:
    """Tell whether this code runs inside the first forward, which compiles the model."""
    phase = _current.get().phase
    return phase is not None and phase.tracing


def current_watch() -> Watch | None:
    """Return the ``ForwardWatch`` that follows the current forward; None without a watch."""
    return _current.get().watch


def require_python() -> None:
    """Record that Python code of the current forward has to run in every forward."""
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
    """Make ``watch`` the current watch of the enclosed code."""
    token = _current.set(_CurrentForward(_current.get().phase, watch))
    try:
        yield
    finally:
        _current.reset(token)
