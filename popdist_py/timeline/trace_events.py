"""Conversion of spans into events of a trace, in the JSON format of Perfetto and chrome://tracing.

The format is the "Trace Event Format". A trace has complete events ('X'), metadata ('M'), counters
('C') and flows ('s', 't', 'f'), with times in microseconds. Two spans of one row must be nested or
disjoint. A span that partly overlaps another span is put into a second row. The functions of this
module do not read or write files.
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

# The beginnings of row names, in the order in which the rows of a process are displayed. Rows with
# other names follow, sorted by name.
_ORDER: Final = ("program", "steps", "device", "IPU ", "collectives", "data loader", "checkpoints")
_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call as one instance made it.

    Attributes:
        key: A value that identifies the collective call. It is equal on all instances.
        begin: The begin in nanoseconds of the trace's clock.
        process: The number of the instance's process in the trace.
        row: The number of the row in which the call is displayed.
    """

    key: tuple[Any, ...]
    begin: int
    process: int
    row: int


class Rows:
    """The rows of one process of the trace, numbered in the order of their first use.

    Args:
        process: The number of the process, from 1.
        numbers: An iterator that yields the numbers of new rows. The trace stores such a number as
            a thread id, so it must be unique in the trace.
    """

    def __init__(self, process: int, numbers: Iterator[int]) -> None:
        self._process = process
        self._free = numbers
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of the row ``name``, which is unique in the trace."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = next(self._free)
        return found

    def events(self) -> Iterator[Event]:
        """Yield events with the names of the rows and with their order."""
        for name, number in self._numbers.items():
            place = next((i for i, first in enumerate(_ORDER) if name.startswith(first)), 9)
            yield _metadata("thread_name", self._process, number, name=name)
            yield _metadata("thread_sort_index", self._process, number, sort_index=place)


def process_events(process: int, name: str) -> Iterator[Event]:
    """Yield events with the name of a process of the trace and with its position."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)


def _metadata(kind: str, process: int, row: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": arguments}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide the spans of one row into lanes, in which any two spans are nested or disjoint.

    Returns:
        The lanes. Each lane is sorted by begin, and for equal begins the longer span comes first.
        If any two of the given spans are nested or disjoint, there is only one lane.
    """
    found: list[list[Span]] = []
    open_ends: list[list[int]] = []  # the ends of each lane's open spans, innermost last
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
    """Yield the events of one process's spans.

    Args:
        spans: The spans, in any order.
        process: The number of the process in the trace.
        rows: The rows of the process.
        clock: A function that converts a time of the spans into nanoseconds of the trace's clock.
        suffix: A text at the end of the names of the rows, such as the name of a worker.
        calls: A list to which the calls that every instance makes are appended.
        job: The first part of the keys of these calls, such as the attempt at a job.
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
    """Return a sort key for names with numbers: IPU 10 comes after IPU 9."""
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
    """Return microseconds that a reader can convert back to the same nanoseconds without rounding.

    Without this correction, some times would lose a nanosecond, and nested spans would partly
    overlap.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _arguments(text: str) -> Mapping[str, Any]:
    """Return the arguments of a span, or an empty mapping if the text was overwritten."""
    try:
        # Python writes NaN and Infinity, which are not valid JSON, and a viewer would refuse the
        # whole trace. Therefore, NaN and Infinity are converted to texts.
        found = json.loads(text or "{}", parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def flow_events(calls: Iterable[Call]) -> Iterator[Event]:
    """Yield flow events, which viewers draw as arrows, for each call of several instances.

    The arrow begins at the instance that began the call first, and passes the other instances in
    the order of their begins. The arrow ends at the instance that began the call last, because all
    other instances waited for this instance.
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
                event["bp"] = "e"  # the arrow ends at the open span, not at the next span
            yield event


def most_waited_for(calls: Iterable[Call]) -> tuple[int, int] | None:
    """Return the process for which the others waited longest, and the waiting time.

    The first call of each name is not counted, because instances do not start at the same time.

    Returns:
        The process, and a sum of nanoseconds over all calls: the time between the begin of a call
        in the first process and its begin in this process. None if no process caused more than half
        of all waiting time.
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
    """Return the parts of each call, sorted by the times when the instances began the call."""
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.key].append(call)
    return [sorted(members, key=lambda call: call.begin) for members in groups.values()]
