"""Functions that find, compare and shorten Python tracebacks in the output of instances.

This module is imported only when an instance writes a traceback or Ctrl-C is pressed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# After Ctrl-C, tracebacks are held for at most _HELD_SECONDS and _MOST_HELD bytes. Python writes a
# traceback within milliseconds, or on a busy machine within tenths of a second.
_HELD_SECONDS = 0.5
_MOST_HELD = 1 << 16

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_BEGIN = "Traceback (most recent call last):"
_HEADER = rf"(?:\[rank\d+\]: ?)?(?:  \+ Exception Group )?{re.escape(_BEGIN)}"
# If the program's own script has a syntax error, Python writes only file and line, without the
# header of a traceback.
_PLACE = r'  File "[^"\n]+", line \d+'
_START = re.compile(rf"(?:{_HEADER}|^{_PLACE})[ ]*(?=\r?\n|\Z)".encode(), re.M)
_START_LINE = re.compile(rf"{_HEADER}|{_PLACE}$")
# The line that Python writes between two chained tracebacks.
_CHAIN = re.compile("The above exception was the direct cause|During handling of the above")
# The last line of a traceback is the first unindented line after its header. The traceback
# of an exception group ends with a horizontal line.
_LAST_LINE = re.compile(rf"(?!{_CHAIN.pattern})\S|\s+\+-+$")
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]{4,}"), "0x"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "date"),
    (re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d+)?"), "time"),
    (re.compile(r"\b(pid|local[ _]rank)([ =:#]{1,2})\d+\b", re.I), r"\1\2N"),
)

# The line that Python writes before the traceback of a worker process or of a destructor.
_BEFORE = re.compile(r"Process \S+:$|Exception ignored in:? ")
_INTERRUPT = re.compile(r"KeyboardInterrupt:?\s*$")
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+)(?:, in (.+))?$')
# The paths of files that do not contain the user's own code.
_LIBRARIES = re.compile(r"/site-packages/|/lib/python3|^<|/(?:popdist_py|poprun_py)/")
_FIRST_OF_HELD = re.compile(
    rb"^(?:Process \S+:$|Exception ignored in|(?:\[rank\d+\]: ?)?Traceback \(most recent)",
    re.MULTILINE,
)


def find_traceback(data: bytes) -> int:
    """Return the position of the first traceback in ``data``, or -1 if there is no traceback."""
    start = _START.search(data)
    return -1 if start is None else start.start()


def normal_line(line: str, index: int, host: str, pid: int) -> str:
    """Return a line of a traceback without the parts that differ between instances of a job.

    Fixed words replace memory addresses, dates, times, and the index, host name (empty if unknown)
    and process id (0 if unknown) of the instance.
    """
    line = _RANK_PREFIX.sub("", line.rstrip())
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    line = re.sub(rf"\b(rank|instance)([ =:#]{{1,2}}){index}\b", r"\1\2N", line, flags=re.I)
    if pid:
        line = re.sub(rf"\b{pid}\b", "PID", line)
    if host:
        line = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST", line)
    return line


def equal_lines(one: list[str], other: list[str]) -> int:
    """Return the number of lines of the traceback with which both ``one`` and ``other`` begin.

    Their lines must come from ``normal_line``. The result is 0 if ``one`` and ``other`` begin with
    different tracebacks, or if one of them contains a second traceback.
    """
    equal = 0
    for line, other_line in zip(one, other, strict=False):
        if line != other_line:
            break
        equal += 1
    starts = [n for n in range(equal) if _START_LINE.match(one[n])]
    has_end = bool(starts) and any(_LAST_LINE.match(one[n]) for n in range(starts[-1] + 1, equal))
    continues = any(
        _START_LINE.match(line) or _CHAIN.match(line) for line in (*one[equal:], *other[equal:])
    )
    return equal if has_end and not continues else 0


def shorten_interrupts(text: str) -> str:
    """Return ``text`` with each traceback of a KeyboardInterrupt reduced to one line.

    The line that replaces a traceback names the last frame in the user's own code.
    """
    lines = text.splitlines(keepends=True)
    bare = [_RANK_PREFIX.sub("", line).rstrip() for line in lines]
    kept: list[str] = []
    at = 0
    while at < len(lines):
        start = at + 1 if _BEFORE.match(bare[at]) and at + 1 < len(lines) else at
        end = _end_of_traceback(bare, start) if bare[start] == _BEGIN else None
        if end is None:
            kept.append(lines[at])
            at += 1
        elif _INTERRUPT.match(bare[end - 1]):
            kept.append(_interrupt_line(bare[start:end]))
            at = end
        else:
            kept += lines[at:end]
            at = end
    return "".join(kept)


def _end_of_traceback(lines: list[str], start: int) -> int | None:
    """Return the index of the line after a (chained) traceback; None if it is incomplete."""
    end = start + 1
    while end < len(lines) and (not lines[end] or lines[end][0] == " "):
        end += 1
    if end == len(lines):
        return None
    end += 1
    after = [n for n in range(end, min(end + 5, len(lines))) if lines[n]]
    if len(after) > 1 and _CHAIN.match(lines[after[0]]) and lines[after[1]] == _BEGIN:
        return _end_of_traceback(lines, after[1])
    return end


def _interrupt_line(traceback: list[str]) -> str:
    frames = [frame for line in traceback if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not _LIBRARIES.search(frame[1])]
    if not frames:
        return "KeyboardInterrupt\n"
    path, number, function = (own or frames)[-1].groups()
    where = "" if function in (None, "<module>") else f" in {function}"
    return f"KeyboardInterrupt{where}, {path} line {number}\n"


class InterruptTracebacks:
    """Shortens the tracebacks that instances write after Ctrl-C; shows other output unchanged."""

    def __init__(self, show: Callable[[int, bytes], None]) -> None:
        self._show = show
        self._held: dict[int, tuple[bytearray, float]] = {}

    def feed(self, index: int, data: bytes, now: float) -> None:
        """Show output of an instance up to its first traceback, and hold the rest of the output."""
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
        """Show the held output of an instance that has ended."""
        if index in self._held:
            held, _ = self._held.pop(index)
            text = held.decode(errors="surrogateescape")
            self._show(index, shorten_interrupts(text).encode(errors="surrogateescape"))

    def on_time(self, now: float) -> None:
        """Show output of instances that has been held for half a second."""
        for index in [index for index, (_, until) in self._held.items() if now >= until]:
            self.ended(index)

    def next_deadline(self) -> float:
        """Return the next time when held output must be shown; inf if no output is held."""
        return min((until for _, until in self._held.values()), default=float("inf"))
