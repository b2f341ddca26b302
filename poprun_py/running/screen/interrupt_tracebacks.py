"""Shortens tracebacks of KeyboardInterrupt after Ctrl-C to one line that names the user's code.

Most frames of such a traceback lie in libraries: in a loader that waits for its workers, or in an
import. Other tracebacks and all other output are passed on unchanged. The module takes and returns
bytes, gets the time as an argument, and holds a bounded amount of output.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Python writes a traceback within milliseconds; on a busy machine, within tenths of a second.
_HELD_SECONDS = 0.5
_MOST_HELD = 1 << 16

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_BEGIN = "Traceback (most recent call last):"
# The line that Python writes before the traceback of a worker process or of a destructor.
_BEFORE = re.compile(r"Process \S+:$|Exception ignored in:? ")
_LINK = re.compile(r"The above exception was the direct cause|During handling of the above")
_INTERRUPT = re.compile(r"KeyboardInterrupt:?\s*$")
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)(?:, in (.+))?$')
# The paths of files that are not the user's own code.
_LIBRARIES = re.compile(r"/site-packages/|/lib/python3|^<|/(?:popdist_py|poprun_py)/")
_FIRST_OF_HELD = re.compile(
    rb"^(?:Process \S+:$|Exception ignored in|(?:\[rank\d+\]: ?)?Traceback \(most recent)",
    re.MULTILINE,
)


def shortened(text: str) -> str:
    """Return ``text``, with each traceback that ends with KeyboardInterrupt reduced to one line."""
    lines = text.splitlines(keepends=True)
    bare = [_RANK_PREFIX.sub("", line).rstrip() for line in lines]
    kept: list[str] = []
    at = 0
    while at < len(lines):
        start = at + 1 if _BEFORE.match(bare[at]) and at + 1 < len(lines) else at
        end = _end_of(bare, start) if bare[start] == _BEGIN else None
        if end is None:
            kept.append(lines[at])
            at += 1
        elif _INTERRUPT.match(bare[end - 1]):
            kept.append(_line_of(bare[start:end]))
            at = end
        else:
            kept += lines[at:end]
            at = end
    return "".join(kept)


def _end_of(lines: list[str], start: int) -> int | None:
    """Return the end of a traceback and of those chained to it; None if it is incomplete."""
    end = start + 1
    while end < len(lines) and (not lines[end] or lines[end][0] == " "):
        end += 1
    if end == len(lines):
        return None
    end += 1
    after = [n for n in range(end, min(end + 5, len(lines))) if lines[n]]
    if len(after) > 1 and _LINK.match(lines[after[0]]) and lines[after[1]] == _BEGIN:
        return _end_of(lines, after[1])
    return end


def _line_of(traceback: list[str]) -> str:
    """Return a line that names the last frame in the user's code, or else the last frame."""
    frames = [frame for line in traceback if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not _LIBRARIES.search(frame[1])]
    if not frames:
        return "KeyboardInterrupt\n"
    path, number, function = (own or frames)[-1].groups()
    where = "" if function in (None, "<module>") else f" in {function}"
    return f"KeyboardInterrupt{where}, {path} line {number}\n"


class InterruptTracebacks:
    """Shortens tracebacks in the stderr of instances after Ctrl-C was passed on to them.

    Args:
        show: takes the index of an instance and the output to show.
    """

    def __init__(self, show: Callable[[int, bytes], None]) -> None:
        self._show = show
        self._held: dict[int, tuple[bytearray, float]] = {}

    def feed(self, index: int, data: bytes, now: float) -> None:
        """Take output of an instance: show it, or hold it from the first traceback on."""
        if index not in self._held:
            first = _FIRST_OF_HELD.search(data)
            start = len(data) if first is None else first.start()
            if start:
                self._show(index, data[:start])
            if first is None:
                return
            self._held[index] = bytearray(), now + _HELD_SECONDS
            data = data[start:]
        held, _ = self._held[index]
        held += data
        if len(held) > _MOST_HELD:
            self.ended(index)

    def ended(self, index: int) -> None:
        """Show the held output of an instance, which has ended or was held for long enough."""
        if index in self._held:
            held, _ = self._held.pop(index)
            text = held.decode(errors="surrogateescape")
            self._show(index, shortened(text).encode(errors="surrogateescape"))

    def on_time(self, now: float) -> None:
        """Show output that has been held for long enough."""
        for index in [index for index, (_, until) in self._held.items() if now >= until]:
            self.ended(index)

    def next_deadline(self) -> float:
        """Return when held output is to be shown; inf if none is held."""
        return min((until for _, until in self._held.values()), default=float("inf"))
