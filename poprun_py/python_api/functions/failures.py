"""Files that tell the calling program why the call of an instance failed.

Each file holds the pickled exception, if it can be pickled, and the traceback as text.
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

# The steps of a call that can fail: unpickling the call, running the function, pickling its result,
# and writing the result to disk.
LOADING, RAISED, RESULT, KEEPING = "loading", "raised", "result", "keeping"
_EXIT_CODE = 1


class RemoteTraceback(Exception):
    """The traceback of an instance as text, set as the cause of the exception that is raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def write_failure(
    prefix: str,
    step: str,
    error: BaseException,
    frames: TracebackType | None,
    part: str = "",
) -> int:
    """Print an exception to stderr, write it to a file, and return the exit code of the instance.

    Args:
        prefix: The path of the file without its suffix ``.failure``.
        step: The step that failed: ``LOADING``, ``RAISED``, ``RESULT`` or ``KEEPING``.
        error: The exception.
        frames: The traceback with the frames of the user's code; None for no traceback.
        part: The part of the function's result that cannot be pickled or written to disk.
    """
    from poprun_py.python_api.functions.pickling import first_line

    lines = traceback.format_exception(type(error), error, frames)
    text = "".join(lines) if step in (LOADING, RAISED) else lines[-1]
    _print(text)
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)
    head = {"what": step, "type": name, "message": first_line(error), "text": text, "part": part}
    try:
        write_packed(Path(f"{prefix}.failure"), head, error if _can_be_sent(error) else None)
    except OSError as problem:
        _print(f"this error cannot be written to a file: {problem}\n")
    return _EXIT_CODE


def _print(text: str) -> None:
    # The user's function may have closed or replaced stderr.
    with contextlib.suppress(Exception):
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.")


def _can_be_sent(error: BaseException) -> bool:
    """Return whether an exception can be pickled and unpickled.

    Unpickling fails, for example, if the exception's class needs more arguments than its ``args``.
    """
    from poprun_py.python_api.functions.pickling import pickle_into

    stream = io.BytesIO()
    try:
        buffers = pickle_into(stream, error)
        return type(pickle.loads(stream.getvalue(), buffers=buffers)) is type(error)
    except Exception:
        return False


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an instance, read from the file that the instance has written.

    Attributes:
        step: The step that failed: ``LOADING``, ``RAISED``, ``RESULT`` or ``KEEPING``.
        summary: The type of the exception and the first line of its message.
        text: The traceback.
        part: The part of the function's result that cannot be pickled or written to disk.
    """

    step: str
    summary: str
    text: str
    part: str
    _file: PackedFile

    def exception(self) -> Exception | None:
        """Return the exception; None if it cannot be unpickled."""
        try:
            error = self._file.load()
        except Exception:
            return None
        # A KeyboardInterrupt or SystemExit of an instance must not end the calling program.
        return error if isinstance(error, Exception) else None


def read_failure(prefix: Path) -> Failure | None:
    """Return the failure that an instance has written, or None if there is no such file."""
    try:
        file = open_packed(prefix.with_name(f"{prefix.name}.failure"))
    except IncompleteFileError:
        return None
    head = file.head
    summary = ": ".join(filter(None, (head["type"], head["message"])))
    return Failure(head["what"], summary, head["text"], head["part"], file)
