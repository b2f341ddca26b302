"""A call of a function, packed: what every instance of the job will do.

The pickle is made at once: what cannot travel is refused before anything starts, by name.
"""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType

from poprun_py.errors import StartError, UsageError, explain_os_error
from poprun_py.planning.user_program import CALL_FILE, function_program
from poprun_py.python_api.functions.packed_file import append_buffers, create
from poprun_py.python_api.functions.pickling import pickle_into, with_its_module
from poprun_py.python_api.functions.unpicklable import what_is_no_value, what_is_wrong


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments.

    Attributes:
        name: what people call it.
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
        """Pack a call; large arrays in its arguments are not copied.

        Args:
            function: closures, lambdas and what a notebook's cells define too.
            args: its arguments.
            kwargs: its arguments by name.

        Raises:
            UsageError: it is no function, or something in it cannot be pickled.
        """
        name = _name(function)
        if not callable(function):
            raise UsageError(f"{name}: expected a function, or a list of words to run a program")
        if hint := what_is_no_value(function):
            raise UsageError(f"{name} {hint}")
        call = (function, tuple(args), dict(kwargs or {}))
        stream = io.BytesIO()
        try:
            with with_its_module(function):
                buffers = pickle_into(stream, call)
        except Exception as error:
            raise UsageError(what_is_wrong(name, *call, error)) from None
        return cls(name, _sources(function), stream.getvalue(), tuple(buffers))

    def program(self, folder: Path | str) -> tuple[str, ...]:
        """Write the call into a folder and return the program that every instance runs.

        Args:
            folder: of this job alone, which nobody else can enter; results will be there too.

        Raises:
            StartError: nothing can be written there.
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
    """Return what people call a function; of an object or a partial, what it is."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _sources(function: object) -> dict[str, list[str]]:
    """Return the lines of code that stands in no file, such as a notebook's cells, by their name.

    Tracebacks of instances show them.
    """
    used = [function]
    if isinstance(function, FunctionType):
        with suppress(ValueError):  # a name of its closure has no value yet
            used += inspect.getclosurevars(function).globals.values()
    names = {each.__code__.co_filename for each in used if isinstance(each, FunctionType)}
    return {name: linecache.getlines(name) for name in names if not Path(name).exists()}


def _module_path() -> list[str]:
    """Return where this Python looks for modules; the instances look there too."""
    paths = []
    for entry in sys.path:
        with suppress(TypeError, OSError):  # no text, or relative to a folder that is gone
            paths.append(os.path.abspath(os.fsdecode(entry)))  # noqa: PTH100
    return paths
