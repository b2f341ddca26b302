"""Pickling of a function and its arguments into the file that the instances of a job read.

Pickling happens before the job starts, so that an error can name the argument that cannot be
pickled.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from poprun_py.errors import UsageError, start_errors
from poprun_py.planning.user_program import CALL_FILE, function_program
from poprun_py.python_api.functions.packed_file import write_packed
from poprun_py.python_api.functions.pickling import (
    error_words,
    path_to_problem,
    pickled,
    pickling_problem,
    with_its_module,
)


def write_call(
    folder: Path,
    function: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    prints_failure: bool = True,
) -> tuple[str, ...]:
    """Pickle a function call into a file, and return the program that every instance runs.

    Args:
        folder: The folder for the pickled call and for the results of the instances.
        function: A function, which may be a closure, a lambda, or defined in a notebook.
        args: The positional arguments of the function. Large arrays in ``args`` are not
            copied.
        kwargs: The keyword arguments of the function.
        prints_failure: Whether an instance prints the traceback of an exception of the function,
            which the calling program raises again.

    Raises:
        UsageError: The function cannot be called in an instance, or a part of the call cannot be
            pickled.
        StartError: The file cannot be written.
    """
    name = function_name(function)
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{name} is an async function: launch a function that returns asyncio.run({name}(...))"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            f"{name} is a generator function: launch a function that returns a list of its values"
        )
    call = (function, tuple(args), dict(kwargs or {}))
    try:
        with with_its_module(function):
            parts = pickled(call)
    except Exception as error:
        raise UsageError(_refusal(name, *call, error)) from None
    head = {
        "path": _module_path(),
        "argv": [str(word) for word in sys.argv],
        "sources": _sources(function),
        "prints_failure": prints_failure,
    }
    with start_errors(f"the function {name} and its arguments cannot be written to a file"):
        write_packed(folder / CALL_FILE, head, parts)
    return function_program(folder, name)


def function_name(function: object) -> str:
    """Return the name of a function, of the function in a partial, or of an object's class."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _refusal(
    name: str,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: BaseException,
) -> str:
    """Return one line that names the part of a call that cannot be pickled, and the reason."""
    for part, value in _parts(function, args, kwargs):
        if problem := pickling_problem(value):
            path = path_to_problem(value)
            return (
                f"{name}: {part}{path and f', at {path},'} cannot be sent to the instances "
                f"({problem}): create this object inside the function instead"
            )
    return (
        f"{name} cannot be sent to the instances ({error_words(error)}): create the objects that "
        f"{name} needs inside the function"
    )


def _parts(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, Any]]:
    """Yield a description and the value of each argument, and of each variable that is used."""
    for number, value in enumerate(args):
        yield f"argument {number} ({type(value).__name__})", value
    for key, value in kwargs.items():
        yield f"argument {key!r} ({type(value).__name__})", value
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        # ``function`` is not written in Python, or uses a variable that is still unset.
        return
    for key, value in {**used.globals, **used.nonlocals}.items():
        yield f"variable {key!r} ({type(value).__name__}), which the function uses,", value


def _sources(function: object) -> dict[str, list[str]]:
    """Map the name of each notebook cell, or of other code without a file, to its source lines.

    The instances' tracebacks show these source lines.
    """
    used = [function]
    if isinstance(function, FunctionType):
        with suppress(ValueError):  # a variable of the closure is still unset
            used += inspect.getclosurevars(function).globals.values()
    names = {each.__code__.co_filename for each in used if isinstance(each, FunctionType)}
    return {name: linecache.getlines(name) for name in names if not Path(name).exists()}


def _module_path() -> list[str]:
    """Return the absolute folders of ``sys.path``, for the instances' search for modules."""
    paths = []
    for entry in sys.path:
        # Skip an entry that is not a string, or is relative to a removed working folder.
        with suppress(TypeError, OSError):
            paths.append(os.path.abspath(os.fsdecode(entry)))  # noqa: PTH100
    return paths
