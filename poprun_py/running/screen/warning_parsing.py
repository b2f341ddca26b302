"""Functions that find and compare warnings of Python and of torch in the output of instances.

This module is imported only when an instance writes text that may be a warning.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from poprun_py.running.screen.traceback_parsing import normal_line

_RANK = rb"(?:\[rank\d+\]:[ ]?)?"
# The first line of a warning of Python's module ``warnings``: ``path:line: UserWarning: text``.
_PYTHON = re.compile(
    _RANK + rb"(?P<place>[^\s:][^\r\n:]*:\d+): (?P<kind>(?:\w+\.)*\w*Warning): [^\n]*"
)
# A line of torch's C++ log: ``[W1127 14:59:00.123456789 socket.cpp:755] text``. Older versions of
# torch write no time, and others write the number of the thread after the time.
_TORCH = re.compile(
    _RANK + rb"\[W(?:\d{4} [\d:.]+(?: +\d+)?)? ?(?P<place>[\w./+-]+:\d+)\][: ][^\n]*"
)
_TORCH_TIME = re.compile(r"\[W\d{4} [\d:.]+(?: +\d+)? ")
# A quick search, whose matches are in the first lines of all warnings and in few other lines.
_CANDIDATE = re.compile(rb"Warning: |\[W[\d ]")
# Python writes the source line of a warning below the warning, with this indentation. A progress
# bar may have the same indentation, but contains carriage returns.
_SOURCE_LINE = re.compile(rb"  [^\s][^\r\n]*(?:\n|\Z)")
# Files whose source lines Python cannot show.
_WITHOUT_SOURCE = re.compile(rb"<|sys:")
_MOST_LINES = 32


class Piece(NamedTuple):
    """A piece of output: a whole warning, or other output.

    Attributes:
        data: The bytes of the piece.
        key: The warning without the parts that differ between processes; empty for other output.
        name: The category and place of the warning, for messages.
    """

    data: bytes
    key: str = ""
    name: str = ""


def split_warnings(
    data: bytes, writer: tuple[int, str, int], *, is_line_start: bool
) -> tuple[list[Piece], bytes]:
    """Split output into warnings and other output.

    Args:
        data: Output of an instance.
        writer: The index, the host name and the process id of the instance.
        is_line_start: Whether the first byte of ``data`` begins a line.

    Returns:
        The pieces, and the rest of the output: the beginning of a warning that may continue.
    """
    pieces: list[Piece] = []
    position = 0
    for candidate in _CANDIDATE.finditer(data):
        start = data.rfind(b"\n", 0, candidate.start()) + 1
        if start < position or (start == 0 and not is_line_start):
            continue
        header = _PYTHON.match(data, start) or _TORCH.match(data, start)
        if header is None:
            continue
        if start > position:
            pieces.append(Piece(data[position:start]))
        end = _end_of_warning(data, header)
        if end is None:
            return pieces, data[start:]
        if end == start:
            position = start
            continue
        pieces.append(Piece(data[start:end], _key(data[start:end], writer), _name(header)))
        position = end
    if position < len(data):
        pieces.append(Piece(data[position:]))
    return pieces, b""


def whole_warning(data: bytes, writer: tuple[int, str, int]) -> Piece:
    """Return the piece for a rest of ``split_warnings`` that did not continue."""
    header = _PYTHON.match(data) or _TORCH.match(data)
    is_whole = header is not None and data.endswith(b"\n")
    return Piece(data, _key(data, writer), _name(header)) if header and is_whole else Piece(data)


def _end_of_warning(data: bytes, header: re.Match[bytes]) -> int | None:
    """Return the position after a warning; None if the end of the warning is not in ``data``.

    If the end of the warning cannot be told from later output, return the warning's own position.
    """
    first = data.find(b"\n", header.end()) + 1
    if not first:
        return None
    if header.re is _TORCH or _WITHOUT_SOURCE.match(header["place"]):
        return first
    if first == len(data):
        return None
    if _SOURCE_LINE.match(data, first):
        return data.find(b"\n", first) + 1 or None
    return _end_of_long_message(data, first) or header.start()


def _end_of_long_message(data: bytes, first: int) -> int | None:
    """Return the position after a message of several lines, whose second line is at ``first``.

    Python writes a warning at once. Therefore the lines up to the next warning or the end of
    ``data`` belong to the message if they end with a source line. Lines without a source line may
    be other output, and the function returns None.
    """
    following = _CANDIDATE.search(data, first)
    end = len(data) if following is None else data.rfind(b"\n", 0, following.start()) + 1
    lines = data[first:end].split(b"\n")
    is_message = (
        2 <= len(lines) <= _MOST_LINES
        and not lines[-1]
        and _SOURCE_LINE.match(lines[-2]) is not None
        and not any(_SOURCE_LINE.match(line) for line in lines[:-2])
        and b"Traceback (most" not in data[first:end]
    )
    return end if is_message else None


def _key(data: bytes, writer: tuple[int, str, int]) -> str:
    text = _TORCH_TIME.sub("[W ", data.decode(errors="replace"))
    return "\n".join(normal_line(line, *writer) for line in text.split("\n"))


def _name(header: re.Match[bytes]) -> str:
    place = header["place"].decode(errors="replace").rpartition("/")[2]
    if header.re is _TORCH:
        return place
    return f"{header['kind'].decode(errors='replace')}, {place}"
