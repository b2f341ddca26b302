"""What keeps an instance from returning a value: as it is written there, and raised again here.

The exception travels as itself where it can; its traceback does as text, which is also on the
instance's stderr, once.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from poprun_py.python_api.functions.packed_file import (
    IncompleteFileError,
    PackedFile,
    open_packed,
    write_packed,
)

# What the instance was doing.
LOADING, RAISED, RESULT, KEEPING = "loading", "raised", "result", "keeping"
_EXIT_CODE = 1


class RemoteTraceback(Exception):
    """The traceback that an instance showed, as text: the cause of what is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def write_failure(
    prefix: str,
    what: str,
    error: BaseException,
    frames: TracebackType | None,
    part: str = "",
) -> int:
    """Show what went wrong on stderr, keep it for the parent, and return the code to end with.

    Args:
        prefix: what the path of the file begins with.
        what: the instance was doing: loading the call, in it (raised), packing its result, or
            keeping that on its disk.
        error: that ended it.
        frames: of the user's code.
        part: of a result that cannot be sent.
    """
    shown = traceback.format_exception(type(error), error, frames)
    text = "".join(shown) if what in (LOADING, RAISED) else shown[-1]
    _say(text)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)
    head = {"what": what, "type": name, "message": first_line(error), "text": text, "part": part}
    try:
        write_packed(Path(f"{prefix}.failure"), head, error if _travels(error) else None)
    except OSError as problem:
        _say(f"this cannot be kept: {problem}\n")
    return _EXIT_CODE


def _say(text: str) -> None:
    """Write to stderr, where the function has left one: what is kept must not depend on it."""
    with contextlib.suppress(Exception):
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says; nothing where it cannot say anything."""
    try:
        return (str(error).splitlines() or [""])[0]
    except Exception:
        return ""


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.")


def _travels(error: BaseException) -> bool:
    """Tell whether an exception can be pickled and made again: not without all its arguments."""
    from poprun_py.python_api.functions.pickling import pickle_into

    stream = io.BytesIO()
    try:
        buffers = pickle_into(stream, error)
        return type(pickle.loads(stream.getvalue(), buffers=buffers)) is type(error)
    except Exception:
        return False


@dataclass(frozen=True, slots=True)
class Failure:
    """What an instance has written about its end.

    Attributes:
        what: it was doing: ``LOADING``, ``RAISED``, ``RESULT`` or ``KEEPING``.
        summary: the type of what was raised and its first line.
        text: the traceback.
        part: of a result that could not be sent.
    """

    what: str
    summary: str
    text: str
    part: str
    _file: PackedFile

    def exception(self) -> Exception | None:
        """Return what was raised, made again; None if that cannot be."""
        try:
            error = self._file.load()
        except Exception:
            return None
        # KeyboardInterrupt, CancelledError and their like would mean something else here.
        return error if isinstance(error, Exception) else None


def read_failure(prefix: Path) -> Failure | None:
    """Return what an instance has written about its end, if it has."""
    try:
        file = open_packed(prefix.with_name(f"{prefix.name}.failure"))
    except IncompleteFileError:
        return None
    head = file.head
    summary = ": ".join(filter(None, (head["type"], head["message"])))
    return Failure(head["what"], summary, head["text"], head["part"], file)
