"""A function and its arguments, pickled for the instances of a job.

Pickling happens before the job starts, so that an error can name the argument that cannot be
pickled.
"""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from poprun_py.errors import StartError, UsageError, explain_os_error
from poprun_py.planning.user_program import CALL_FILE, function_program
from poprun_py.python_api.functions.packed_file import append_buffers, create
from poprun_py.python_api.functions.pickling import (
    error_words,
    path_to_problem,
    pickle_into,
    pickling_problem,
    with_its_module,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A pickled function with its arguments.

    Attributes:
        name: The name of the function.
    """

    name: str
    _sources: Mapping[str, list[str]] = field(repr=False)
    _stream: bytes = field(repr=False)
    _buffers: tuple[pickle.PickleBuffer, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Call:
        """Pickle a function and its arguments, without copying large arrays.

        Args:
            function: A function, which may be a closure, a lambda, or defined in a notebook.
            args: The positional arguments of the function.
            kwargs: The keyword arguments of the function.

        Raises:
            UsageError: ``function`` is not a function, or a part of the call cannot be pickled.
        """
        name = _name(function)
        if not callable(function):
            raise UsageError(f"{name}: expected a function, or a list of words to run a program")
        if inspect.iscoroutinefunction(function):
            raise UsageError(
                f"{name} is async: give a function that returns asyncio.run(...) of it"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{name} is a generator: give a function that returns a list of its values"
            )
        call = (function, tuple(args), dict(kwargs or {}))
        stream = io.BytesIO()
        try:
            with with_its_module(function):
                buffers = pickle_into(stream, call)
        except Exception as error:
            raise UsageError(_refusal(name, *call, error)) from None
        return cls(name, _sources(function), stream.getvalue(), tuple(buffers))

    def program(self, folder: Path | str) -> tuple[str, ...]:
        """Write the call into a folder, and return the program that every instance runs.

        Args:
            folder: The private folder of this job, which also receives the results.

        Raises:
            StartError: The file cannot be written.
        """
        path = Path(folder).absolute() / CALL_FILE
        head = {
            "name": self.name,
            "path": _module_path(),
            "argv": [str(word) for word in sys.argv],
            "sources": self._sources,
        }
        try:
            with create(path) as file:
                file.write(self._stream)
                append_buffers(file, head, self._buffers)
        except OSError as error:
            problem = f"{self.name} and its arguments cannot be written"
            raise StartError(explain_os_error(error, problem)) from None
        return function_program(path.parent, self.name)


def _name(function: object) -> str:
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
                f"({problem}): make it inside the function instead"
            )
    return (
        f"{name} cannot be sent to the instances ({error_words(error)}): make what it needs "
        "inside the function"
    )


def _parts(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[str, Any]]:
    """Yield a description and the value of each argument, and of each variable of the function."""
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
        yield f"{key!r} ({type(value).__name__}), which it uses,", value


def _sources(function: object) -> dict[str, list[str]]:
    """Return the source lines of the code that is not in a file, such as cells of a notebook.

    The result maps the name of each piece of code to its lines, which the instances' tracebacks
    show.
    """
    used = [function]
    if isinstance(function, FunctionType):
        with suppress(ValueError):  # a variable of the closure is still unset
            used += inspect.getclosurevars(function).globals.values()
    names = {each.__code__.co_filename for each in used if isinstance(each, FunctionType)}
    return {name: linecache.getlines(name) for name in names if not Path(name).exists()}


def _module_path() -> list[str]:
    """Return the absolute folders of ``sys.path``, where the instances search for modules too."""
    paths = []
    for entry in sys.path:
        # Skip entries that are not strings, and relative paths if the working folder was removed.
        with suppress(TypeError, OSError):
            paths.append(os.path.abspath(os.fsdecode(entry)))  # noqa: PTH100
    return paths
