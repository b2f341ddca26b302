"""What the instances of a job do alike: they fail together, and stop at the same call."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import popdist_py

__all__ = ["Agreed", "end", "on_instance_0", "stop_requests", "together"]


class Agreed(ValueError):
    """An error that all instances know of, so that one of them may speak."""


def together(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; where it fails on one instance, it fails on all. Collective.

    Nothing in ``call`` may be collective: instances where it fails do not get there.

    Raises:
        Agreed: The ValueError of the first instance that had one.
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
    """Return what ``call`` returns on instance 0, on all instances; collective.

    Raises:
        Agreed: It raised ValueError or OSError there; on all instances, so that none waits.
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


def end(error: Exception, code: int = 2) -> NoReturn:
    """End the program in one line.

    A ValueError may be of this instance alone, which then says it. Any other error, and one that
    the instances agree on, is the same on all: instance 0 speaks.
    """
    is_own = isinstance(error, ValueError) and not isinstance(error, Agreed)
    if is_own or popdist_py.getInstanceIndex() == 0:
        said = getattr(error, "message", str(error))
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {said}\n")
    sys.exit(code)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield what says whether to stop, at the same call on every instance.

    The launcher has its own way to ask; without it, SIGTERM asks.
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
