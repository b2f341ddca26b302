"""Finds in what cannot be pickled the part that a user knows by name."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from poprun_py.python_api.functions.failures import first_line
from poprun_py.python_api.functions.pickling import pickle_into

# How far into nested values the search goes.
_MOST_LEVELS = 4


def what_is_wrong(
    name: str,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: BaseException,
) -> str:
    """Return one line that names the part of a call that cannot be sent, and says why."""
    for place, value in _parts_of_call(function, args, kwargs):
        if problem := _problem(value):
            found = where(value)
            return (
                f"{name}: {place}{found and f', at {found},'} cannot be sent to the instances "
                f"({problem}): make it inside the function instead"
            )
    return (
        f"{name} cannot be sent to the instances ({_said_by(error)}): make what it needs "
        "inside the function"
    )


def what_is_no_value(function: object) -> str:
    """Return why what a call returns is nothing that can be sent, in words after its name."""
    if inspect.iscoroutinefunction(function):
        return "is async: give a function that returns asyncio.run(...) of it"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "is a generator: give a function that returns a list of its values"
    return ""


def where(value: object, levels: int = _MOST_LEVELS) -> str:
    """Return the way to the part of a value that cannot be pickled: ``['model'].lock``."""
    for step, part in _parts(value) if levels else ():
        if _problem(part):
            return step + where(part, levels - 1)
    return ""


def _parts_of_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(args):
        yield f"argument {number} ({type(value).__name__})", value
    for key, value in kwargs.items():
        yield f"argument {key!r} ({type(value).__name__})", value
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function of Python
        return
    for key, value in {**used.globals, **used.nonlocals}.items():
        yield f"{key!r} ({type(value).__name__}), which it uses,", value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from ((f".{key}", part) for key, part in attributes.items())


def _problem(value: object) -> str:
    """Return why a value cannot be pickled; nothing if it can."""
    try:
        pickle_into(io.BytesIO(), value)
    except Exception as error:
        return _said_by(error)
    return ""


def _said_by(error: BaseException) -> str:
    return first_line(error) or type(error).__name__
