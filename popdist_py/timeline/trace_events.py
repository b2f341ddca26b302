"""Spans as events of a trace: the JSON that Perfetto and chrome://tracing read.

The format is that of the "Trace Event Format": complete events ('X'), metadata ('M'), counters
('C') and flows ('s', 't', 'f'), with times in microseconds. A row shows spans that lie inside one
another or apart; what would overlap half gets a row of its own. Pure: nothing here reads or writes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.timeline.span_file import Span

__all__ = ["Call", "Event", "Rows", "flow_events", "lanes", "process_events", "span_events"]

Event = dict[str, Any]

# The rows of a process, from the top; others follow by name.
_ORDER: Final = ("program", "device", "IPU ", "collectives", "data loader", "checkpoints")
# So many rows are kept apart for each process, so that no two processes share a thread id.
_ROWS_PER_PROCESS: Final = 10_000
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
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of the row of this name, which no other process has."""
        if name not in self._numbers and len(self._numbers) >= _ROWS_PER_PROCESS - 1:
            name = "(more rows)"
        first = self._process * _ROWS_PER_PROCESS
        return self._numbers.setdefault(name, first + len(self._numbers))

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
            name = track + suffix + (f" #{lane + 1}" if lane else "")
            row = rows.number(name)
            for span in of_lane:
                begin = clock(span.begin)
                event = _complete(span, begin, clock(span.end) - begin, process, row)
                yield event
                if span.number is not None and calls is not None:
                    calls.append(Call((job, span.name, span.number), begin, process, row))
                if span.name == _STEP:
                    yield {
                        "ph": "C", "name": "step time", "pid": process,
                        "ts": event["ts"] + event["dur"], "args": {"ms": event["dur"] / 1000},
                    }  # fmt: skip


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key to sort names with: IPU 10 comes after IPU 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _complete(span: Span, begin: int, length: int, process: int, row: int) -> Event:
    event: Event = {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": process,
        "tid": row,
        "ts": begin / 1000,
        "dur": max(0, length) / 1000,
    }
    arguments = _arguments(span.arguments)
    if span.number is not None:
        arguments = {**arguments, "call": span.number}
    if arguments:
        event["args"] = arguments
    return event


def _arguments(text: str) -> Mapping[str, Any]:
    """Return the arguments of a span; nothing of what was overwritten meanwhile."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def flow_events(calls: Iterable[Call]) -> Iterator[Event]:
    """Yield an arrow through each call that several instances made, in the order of arrival.

    It begins where the first one arrived and ends at the one for which all the others waited.
    """
    groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.key].append(call)
    for identity, (key, members) in enumerate(groups.items(), start=1):
        members.sort(key=lambda call: call.begin)
        last = len(members) - 1
        for place, call in enumerate(members if last else ()):
            event: Event = {
                "ph": "s" if place == 0 else "f" if place == last else "t",
                "name": key[1],
                "cat": "call",
                "id": identity,
                "pid": call.process,
                "tid": call.row,
                "ts": call.begin / 1000,
            }
            if place == last:
                event["bp"] = "e"  # to the span that is open then, not to the next
            yield event
