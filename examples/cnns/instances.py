"""What the instances of a job do alike: they fail together, and stop at the same call."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import popdist_py

__all__ = ["Agreed", "refuse", "stop_requests", "together"]


class Agreed(ValueError):
    """An error that all instances know of, so that one of them may speak."""


def together(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; where it fails on one instance, it fails on all. Collective.

    Raises:
        Agreed: the ValueError of the first instance that had one.
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


def refuse(parser: argparse.ArgumentParser, error: ValueError) -> NoReturn:
    """End the program with exit code 2; of instances that agree on the error, one speaks."""
    if isinstance(error, Agreed) and popdist_py.getInstanceIndex() != 0:
        sys.exit(2)
    parser.error(str(error))


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
