"""A context variable with the state of the forward pass that the current thread runs.

The model wrappers and ``ForwardWatch`` set the context variable of the forward pass. PopTorch's
operators and annotations read the context variable of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = [
    "ForwardPhase",
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
    """The interface of ``ForwardWatch``, the recorder of a forward pass.

    The module ``current_forward`` cannot import the class ``ForwardWatch``, because the module
    ``forward_watch`` imports ``current_forward``.

    Attributes:
        losses: The ``Losses`` of the forward pass; None if losses are not recorded.
        blocks: The ``BlockRecorder`` of the forward pass; None if blocks are not recorded.
        overlap: The ``OverlapMarks`` of the forward pass; None if overlap marks are not recorded.
        observer: The ``Observer`` of the forward pass; None if operations are not recorded.
        needs_python: Whether Python code of the forward method has to run in every forward pass.
    """

    losses: Any
    blocks: Any
    overlap: Any
    observer: Any
    needs_python: bool


@dataclass(frozen=True, slots=True)
class ForwardPhase:
    """The state of a model wrapper while it runs the user's forward method.

    Attributes:
        training: Whether a backward pass follows the forward pass.
        tracing: Whether the forward pass is the first one, which is traced to compile the model.
    """

    training: bool
    tracing: bool


@dataclass(frozen=True, slots=True)
class _CurrentForward:
    phase: ForwardPhase | None = None
    watch: Watch | None = None


_NO_FORWARD: Final = _CurrentForward()
# A forward pass may run in several threads. Each thread of a forward pass has a copy of the context
# of the thread that started the forward pass.
_current: Final[ContextVar[_CurrentForward]] = ContextVar("forward", default=_NO_FORWARD)


def is_running() -> bool:
    """Tell whether the caller runs inside the forward pass of a wrapped model."""
    return _current.get().phase is not None


def is_training() -> bool:
    """Tell whether the caller runs inside the forward pass of a training model."""
    phase = _current.get().phase
    return phase is not None and phase.training


def is_tracing() -> bool:
    """Tell whether the caller runs in the forward pass that is traced to compile the model."""
    phase = _current.get().phase
    return phase is not None and phase.tracing


def current_watch() -> Watch | None:
    """Return the ``ForwardWatch`` of the current forward pass; None if nothing is recorded."""
    return _current.get().watch


def require_python() -> None:
    """Record that Python code of the forward method has to run in every forward pass."""
    watch = current_watch()
    if watch is not None:
        watch.needs_python = True


@contextmanager
def entered(phase: ForwardPhase) -> Iterator[None]:
    """Mark the ``with`` block as the forward pass of a wrapped model."""
    token = _current.set(_CurrentForward(phase, _current.get().watch))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Make ``watch`` the current ``ForwardWatch`` inside the ``with`` block."""
    token = _current.set(_CurrentForward(_current.get().phase, watch))
    try:
        yield
    finally:
        _current.reset(token)
