"""Conversion of spans into events of a trace, in the JSON format of Perfetto and chrome://tracing.

The format is the "Trace Event Format". A trace has complete events ('X'), metadata ('M'), counters
('C') and flows ('s', 't', 'f'), with times in microseconds. In this format, two spans of one row
must be nested or disjoint. A span that partly overlaps another span is put into a second row. The
functions of this module do not read or write files.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.timeline.span_file import Span

Event = dict[str, Any]

# Prefixes of row names, in the order in which the rows of a process are displayed. Rows without
# such a prefix follow, sorted by name.
_ORDER: Final = ("program", "steps", "device", "IPU ", "collectives", "data loader", "checkpoints")
_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class Call:
    """One instance's part in a collective call.

    Attributes:
        key: A value that identifies the collective call and is equal on all instances.
        begin: The time when the instance began the call, in nanoseconds of the trace's clock.
        process: The process id that stands for the instance in the trace.
        row: The number of the row in which the call is displayed.
    """

    key: tuple[Any, ...]
    begin: int
    process: int
    row: int


class Rows:
    """The rows of one process of the trace, numbered in the order of their first use.

    Args:
        process: The number of the process in the trace, counted from 1.
        numbers: An iterator that yields the numbers of new rows. The trace stores the number of a
            row as a thread id, so the number must be unique in the trace.
    """

    def __init__(self, process: int, numbers: Iterator[int]) -> None:
        self._process = process
        self._free = numbers
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of the row ``name``. The number is unique in the trace."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = next(self._free)
        return found

    def events(self) -> Iterator[Event]:
        """Yield metadata events that give the names and the order of the rows."""
        for name, number in self._numbers.items():
            place = next((i for i, first in enumerate(_ORDER) if name.startswith(first)), 9)
            yield _metadata("thread_name", self._process, number, name=name)
            yield _metadata("thread_sort_index", self._process, number, sort_index=place)


def process_events(process: int, name: str) -> Iterator[Event]:
    """Yield metadata events that give the name and the position of a process in the trace."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)


def _metadata(kind: str, process: int, row: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": arguments}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide the spans of one row into lanes, in which any two spans are nested or disjoint.

    Returns:
        The lanes, each sorted by start time. Of two spans with the same start time, the longer span
        comes first. If any two of the given spans are nested or disjoint, there is only one lane.
    """
    found: list[list[Span]] = []
    open_ends: list[list[int]] = []  # end times of each lane's open spans, innermost last
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for place, ends in enumerate(open_ends):  # noqa: B007 (used after the loop)
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                break
        else:
            place = len(found)
            found.append([])
            open_ends.append([])
        found[place].append(span)
        open_ends[place].append(span.end)
    return found


def span_events(
    spans: Sequence[Span],
    process: int,
    rows: Rows,
    clock: Callable[[int], int],
    *,
    suffix: str = "",
    calls: list[Call] | None = None,
    job: str = "",
) -> Iterator[Event]:
    """Yield the trace events for the spans of one process.

    Args:
        spans: The spans, in any order.
        process: The number of the process in the trace.
        rows: The rows of the process.
        clock: A function that converts a time of the spans into nanoseconds of the trace's clock.
        suffix: A text that is appended to the name of each row, such as the name of a worker
            process.
        calls: A list to which the collective calls among the spans are appended.
        job: The first part of each collective call's key, such as the number of the job's attempt.
    """
    by_track: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_track[span.track].append(span)
    for track, members in sorted(by_track.items(), key=lambda item: _by_number(item[0])):
        for lane, of_lane in enumerate(lanes(members)):
            row = rows.number(track + suffix + (f" #{lane + 1}" if lane else ""))
            for span in of_lane:
                begin, end = clock(span.begin), clock(span.end)
                yield _complete(span, begin, end, process, row)
                if span.number is not None and calls is not None:
                    calls.append(Call((job, span.name, span.number), begin, process, row))
                if span.name == _STEP and not span.is_open:
                    yield {
                        "ph": "C", "name": "step time", "pid": process,
                        "ts": _microseconds(end), "args": {"ms": (end - begin) / 1e6},
                    }  # fmt: skip


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them, such as IPU 9 before IPU 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _complete(span: Span, begin: int, end: int, process: int, row: int) -> Event:
    event: Event = {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": process,
        "tid": row,
        "ts": _microseconds(begin),
        "dur": _microseconds(end - begin),
    }
    arguments = _arguments(span.arguments)
    if span.number is not None:
        arguments = {**arguments, "call": span.number}
    if span.is_open:
        arguments = {**arguments, "unfinished": True}
    if arguments:
        event["args"] = arguments
    return event


def _microseconds(nanoseconds: int) -> float:
    """Return microseconds from which ``int(1000 * microseconds)`` restores the nanoseconds.

    If the microseconds were not rounded up, some times would lose a nanosecond, and nested spans
    would partly overlap.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _arguments(text: str) -> Mapping[str, Any]:
    """Return a span's arguments from JSON, or an empty mapping if ``text`` is not a JSON object."""
    try:
        # Python's encoder writes NaN and Infinity, which are not valid JSON. A viewer would refuse
        # the whole trace, so NaN and Infinity are converted to texts.
        found = json.loads(text or "{}", parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def flow_events(calls: Iterable[Call]) -> Iterator[Event]:
    """Yield flow events, which viewers draw as an arrow for each call of several instances.

    The arrow connects the instances in the order in which they began the call. The arrow ends at
    the instance that began the call last, because all other instances waited for this instance.
    """
    for identity, members in enumerate(_by_arrival(calls), start=1):
        last = len(members) - 1
        for place, call in enumerate(members if last else ()):
            event: Event = {
                "ph": "s" if place == 0 else "f" if place == last else "t",
                "name": call.key[1],
                "cat": "call",
                "id": identity,
                "pid": call.process,
                "tid": call.row,
                "ts": _microseconds(call.begin),
            }
            if place == last:
                event["bp"] = "e"  # the arrow ends at the enclosing span, not at the next span
            yield event


def most_waited_for(calls: Iterable[Call]) -> tuple[int, int] | None:
    """Return the process that caused most of the waiting time in collective calls, and this time.

    The first call of each name is not counted, because instances do not start at the same time.

    Returns:
        The process and the waiting time that it caused, in nanoseconds. None if no process caused
        more than half of all waiting time. In each call, the process that began the call last
        caused the waiting time since the first process began the call.
    """
    waits: dict[int, int] = defaultdict(int)
    seen: set[tuple[Any, ...]] = set()
    for members in sorted(_by_arrival(calls), key=lambda members: members[-1].begin):
        name = members[0].key[:2]  # the attempt and the name of the call
        if name in seen:
            waits[members[-1].process] += members[-1].begin - members[0].begin
        seen.add(name)
    process = max(waits, key=lambda each: waits[each], default=None)
    if process is None or 2 * waits[process] <= sum(waits.values()):
        return None
    return process, waits[process]


def _by_arrival(calls: Iterable[Call]) -> list[list[Call]]:
    """Group the instances' calls by collective call, each group sorted by start time."""
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.key].append(call)
    return [sorted(members, key=lambda call: call.begin) for members in groups.values()]
