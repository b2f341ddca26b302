"""Python tracebacks in what instances write: where one begins and ends, and which are the same.

Pure: text in, values out. Two tracebacks are the same if they differ in nothing but what tells the
instances of one job apart: addresses, process ids, numbers of instances, hosts, times.
"""

from __future__ import annotations

import re

_HEADER = r"(?:\[rank\d+\]: ?)?(?:  \+ Exception Group )?Traceback \(most recent call last\):"
# A program that Python could not parse has no header, only the place.
_PLACE = r'  File "[^"\n]+", line \d+'
_START = re.compile(rf"(?:{_HEADER}|^{_PLACE})[ ]*(?=\r?\n|\Z)".encode(), re.M)
_START_LINE = re.compile(rf"{_HEADER}|{_PLACE}$")
_LINK = r"The above exception was the direct cause|During handling of the above"
_CHAIN = re.compile(_LINK)
# The line of the exception is the first that is not indented; a group ends with a rule.
_LAST_LINE = re.compile(rf"(?!{_LINK})\S|\s+\+-+$")

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]{4,}"), "0x"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "date"),
    (re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d+)?"), "time"),
    (re.compile(r"\b(pid|local[ _]rank)([ =:#]{1,2})\d+\b", re.I), r"\1\2N"),
)


def find_traceback(data: bytes) -> int:
    """Return where a traceback begins in what an instance wrote; -1 for nowhere."""
    start = _START.search(data)
    return -1 if start is None else start.start()


def normal_line(line: str, index: int, host: str, pid: int) -> str:
    """Return a line of a traceback without what differs between instances of one job.

    Args:
        line: the line.
        index: the instance that wrote it.
        host: the name of its host; may be empty.
        pid: its process id; 0 if that is not known.
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
    """Return how many lines at the beginning of two outputs are one and the same whole traceback.

    0 if a traceback, or one that led to it, goes on differently in one of the outputs.

    Args:
        one: lines in their normal form, from the beginning of a traceback.
        other: the same of another instance.
    """
    equal = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        equal += 1
    starts = [n for n in range(equal) if _START_LINE.match(one[n])]
    has_end = bool(starts) and any(_LAST_LINE.match(one[n]) for n in range(starts[-1] + 1, equal))
    goes_on = any(
        _START_LINE.match(line) or _CHAIN.match(line) for line in (*one[equal:], *other[equal:])
    )
    return equal if has_end and not goes_on else 0
