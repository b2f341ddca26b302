"""Tracebacks that IPython and Jupyter show: the frames of the user's code, without the library's.

IPython calls ``error._render_traceback_()`` if an error has this method. Nothing here changes what
Python itself shows, which is the whole traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OWN_FOLDERS = tuple(
    f"{Path(__file__).resolve().parents[2] / name}/" for name in ("poprun_py", "popdist_py")
)
_OF_IPYTHON = re.compile(r"/(?:IPython|ipykernel)/[^<>]*\.py$")
_HEADER = "Traceback (most recent call last):\n"
_FRAME = re.compile(
    r'^  File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?P<rest>.*)\n(?:    .*\n)*', re.M
)
_WIDTH = 75
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def running_ipython() -> Any | None:
    """Return the IPython shell that runs this program's code; None outside IPython."""
    ipython = sys.modules.get("IPython")
    find: Callable[[], Any] | None = getattr(ipython, "get_ipython", None)
    return find() if find is not None else None


class UserTraceback:
    """Renders an error for IPython; an error stores an object of this class as an attribute."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def __call__(self) -> list[str]:
        """Return the lines of the traceback."""
        error = self._error or sys.exc_info()[1]
        return [] if error is None else traceback_lines(error)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled error must not contain itself a second time.
        return UserTraceback, ()


def traceback_lines(error: BaseException) -> list[str]:
    """Return the lines of the one traceback that IPython shows for an error.

    The lines name the user's code that called the library. If the error happened in an instance,
    the instance's frames follow. The attribute ``instance_text`` of the error's cause is the
    traceback of the instance.
    """
    shell = running_ipython()
    name = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    kind = type(error).__name__
    has_colour = str(getattr(shell, "colors", "nocolor")).lower() != "nocolor"
    shown = f"{_RED}{kind}{_PLAIN}" if has_colour else kind
    title = _HEADER.rstrip(":\n")
    room = max(_WIDTH - len(kind), len(title) + 1)
    lines = ["-" * _WIDTH, f"{shown}{title:>{room}}"]
    lines += _shown_frames("".join(_calling_frames(error)), name).splitlines()
    own = "".join(traceback.format_exception_only(error)).splitlines()
    own[0] = own[0].removeprefix("poprun_py.errors.")
    if text := str(getattr(error.__cause__, "instance_text", "")):
        lines += _instance_lines(text, name)
        # The text of the instance ends with the error. Notes of the calling program are not in it.
        in_text = set(text.splitlines())
        own = [line for line in own if line not in in_text]
    return lines + own


def _calling_frames(error: BaseException) -> list[str]:
    """Return the frames of the user's code that called the library, as text."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next(
        (n for n, each in enumerate(frames) if each.filename.startswith(_OWN_FOLDERS)), None
    )
    if first is not None and first and _is_made_by_dataclass(frames[first - 1]):
        first -= 1
    shown = [each for each in frames[:first] if not _OF_IPYTHON.search(each.filename)]
    return traceback.format_list(shown)


def _is_made_by_dataclass(frame: traceback.FrameSummary) -> bool:
    return (frame.filename, frame.name) == ("<string>", "__init__")


def _instance_lines(text: str, name: Callable[[str], Any]) -> list[str]:
    """Return the lines of an instance's traceback, without its header if there is only one."""
    if text.startswith(_HEADER) and text.count(_HEADER) == 1:
        text = text.removeprefix(_HEADER)
    return ["in the instance:", *_shown_frames(text, name).splitlines()]


def _shown_frames(text: str, name: Callable[[str], Any]) -> str:
    """Return text with IPython's names of cells, and without the frames of this library."""

    def shown(frame: re.Match[str]) -> str:
        if frame["path"].startswith(_OWN_FOLDERS):
            return ""
        cell = name(frame["path"])
        if cell is None:
            return frame[0]
        rest = frame["rest"].removesuffix(", in <module>")
        _, _, code = frame[0].partition("\n")
        return f"  {' '.join(cell)}, line {frame['line']}{rest}\n{code}"

    return _FRAME.sub(shown, text)
