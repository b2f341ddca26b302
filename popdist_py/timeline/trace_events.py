"""Spans as events of a trace: the JSON that Perfetto and chrome://tracing read.

The format is that of the "Trace Event Format": complete events ('X'), metadata ('M'), counters
('C') and flows ('s', 't', 'f'), with times in microseconds. A row shows spans that lie inside one
another or apart; what would overlap half gets a row of its own. Pure: nothing here reads or writes.
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

__all__ = [
    "Call",
    "Event",
    "Rows",
    "flow_events",
    "lanes",
    "most_waited_for",
    "process_events",
    "span_events",
]

Event = dict[str, Any]

# The rows of a process, from the top; others follow by name.
_ORDER: Final = ("program", "steps", "device", "IPU ", "collectives", "data loader", "checkpoints")
_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that every instance makes, as one of them made it.

    Attributes:
        key: the same for the same call of all instances.
        begin: nanoseconds on the trace's clock.
        process: the instance's process in the trace.
        row: its row there.
    """

    key: tuple[Any, ...]
    begin: int
    process: int
    row: int


class Rows:
    """The rows of one process of the trace, numbered as they come.

    Args:
        process: the number of the process, from 1.
        numbers: gives the numbers, each once in a trace: they are its thread ids.
    """

    def __init__(self, process: int, numbers: Iterator[int]) -> None:
        self._process = process
        self._free = numbers
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of the row of this name, which no other process has."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = next(self._free)
        return found

    def events(self) -> Iterator[Event]:
        """Yield the names of the rows, and their order."""
        for name, number in self._numbers.items():
            place = next((i for i, first in enumerate(_ORDER) if name.startswith(first)), 9)
            yield _metadata("thread_name", self._process, number, name=name)
            yield _metadata("thread_sort_index", self._process, number, sort_index=place)


def process_events(process: int, name: str) -> Iterator[Event]:
    """Yield the name of a process of the trace, and its place among the others."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)


def _metadata(kind: str, process: int, row: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": arguments}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide the spans of one row so that in each lane any two are nested or apart.

    Returns:
        Lanes, each in the order of a trace: by begin, the longer first. What nests by itself is
        one lane.
    """
    found: list[list[Span]] = []
    open_ends: list[list[int]] = []  # of each lane: of the spans that are open, the inner last
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
        spans: in any order.
        process: the number of the process in the trace.
        rows: gives the rows their numbers.
        clock: turns nanoseconds of the spans' clock into those of the trace.
        suffix: what the names of these rows end with, such as the name of a worker.
        calls: gets the calls that every instance makes.
        job: what the keys of these calls begin with, such as the attempt at a job.
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
    """Return a key to sort names with: IPU 10 comes after IPU 9."""
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
    """Return nanoseconds so that they are the same to a reader who does not round.

    Else one would be missing here and there, and spans that nest would overlap by it.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _arguments(text: str) -> Mapping[str, Any]:
    """Return the arguments of a span; nothing of what was overwritten meanwhile."""
    try:
        # NaN and Infinity, which Python writes, are no JSON: readers would refuse all of the trace.
        found = json.loads(text or "{}", parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def flow_events(calls: Iterable[Call]) -> Iterator[Event]:
    """Yield an arrow through each call that several instances made, in the order of arrival.

    It begins where the first one arrived and ends at the one for which all the others waited.
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
                event["bp"] = "e"  # to the span that is open then, not to the next
            yield event


def most_waited_for(calls: Iterable[Call]) -> tuple[int, int] | None:
    """Return the process that the others waited for most of the time, and for how long.

    The first call of each name is left out: instances do not start at the same time.

    Returns:
        The process and the nanoseconds from the first arrival to its own, over all calls; None if
        none was waited for longer than all others together.
    """
    waits: dict[int, int] = defaultdict(int)
    seen: set[tuple[Any, ...]] = set()
    for members in sorted(_by_arrival(calls), key=lambda members: members[-1].begin):
        name = members[0].key[:2]  # with the attempt
        if name in seen:
            waits[members[-1].process] += members[-1].begin - members[0].begin
        seen.add(name)
    process = max(waits, key=lambda each: waits[each], default=None)
    if process is None or 2 * waits[process] <= sum(waits.values()):
        return None
    return process, waits[process]


def _by_arrival(calls: Iterable[Call]) -> list[list[Call]]:
    """Return each call as the instances made it, the first to arrive first."""
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.key].append(call)
    return [sorted(members, key=lambda call: call.begin) for members in groups.values()]
