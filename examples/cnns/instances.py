"""Functions with which the instances of a job fail together, and stop at the same call."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import popdist_py

__all__ = ["Agreed", "end", "on_instance_0", "say", "stop_requests", "together"]


class Agreed(ValueError):
    """An error that all instances raise, so that only one of them prints it."""


def together(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``; if ``call`` fails on one instance, raise an error on all.

    All instances call this function together. ``call`` itself must not be collective, because an
    instance on which ``call`` fails early would not take part.

    Raises:
        Agreed: ``call`` raised ValueError. The message is from the first instance with an error.
    """
    result, error = None, None
    try:
        result = call()
    except ValueError as raised:
        error = str(raised)
    errors = [text for text in popdist_py.all_gather_object(error) if text is not None]
    if errors:
        raise Agreed(errors[0])
    return result


def on_instance_0(call: Callable[[], Any]) -> Any:
    """Call ``call`` on instance 0, and return its result on all instances. Collective.

    Raises:
        Agreed: ``call`` raised ValueError or OSError. All instances raise this error, so that none
            of them waits for the others.
    """
    result = error = None
    if popdist_py.getInstanceIndex() == 0:
        try:
            result = call()
        except ValueError as raised:
            error = str(raised)
        except OSError as raised:
            error = f"{raised.filename}: {raised.strerror}; a folder that can be written is needed"
    result, error = popdist_py.broadcast_object((result, error))
    if error is not None:
        raise Agreed(error)
    return result


def say(line: str) -> None:
    """Print a line on instance 0."""
    if popdist_py.getInstanceIndex() == 0:
        print(line, flush=True)


def end(error: Exception, code: int = 2) -> NoReturn:
    """Print an error as one line, and end the program.

    A ValueError may have occurred on this instance only, so this instance prints the error. Other
    errors, and errors of the class Agreed, are the same on all instances, so only instance 0 prints
    them.
    """
    is_own = isinstance(error, ValueError) and not isinstance(error, Agreed)
    if is_own or popdist_py.getInstanceIndex() == 0:
        said = getattr(error, "message", str(error))
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {said}\n")
    sys.exit(code)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether to stop. The result is the same on all instances.

    The launcher sends stop requests to the instances. Without the launcher, SIGTERM is a stop
    request.
    """
    if popdist_py.isPopdistEnvSet():
        yield popdist_py.stopRequested
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGTERM, before)
