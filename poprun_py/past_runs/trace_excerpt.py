"""A few training steps out of the middle of a run's trace (``timeline.json.gz``).

The trace may be large: no more than its beginning is read, which holds the first instances. Its
lines are events, as popdist_py/timeline/trace_events.py writes them. Nothing here draws.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from poprun_py.past_runs.recorded_run import NOT_A_RUN

# Of the unpacked trace: some 80,000 spans.
_MOST_BYTES: Final = 8 << 20
_STEPS, _MOST_SPANS = 3, 1500
_STEP: Final = '"name":"step"'
# Spans that follow one another may overlap by what rounding adds, in microseconds.
_ROUNDING: Final = 0.01


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """What went on in a row: seconds since the excerpt begins; ``depth`` spans lie around it."""

    row: str
    name: str
    begin: float
    seconds: float
    depth: int


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Spans by row and time; ``at`` is when they begin, in seconds since the trace does."""

    at: float
    seconds: float
    num_steps: int
    spans: tuple[TraceSpan, ...]


def read_excerpt(path: Path) -> Excerpt | None:
    """Return some steps of the middle of a trace; None if there is none, or no step in it."""
    try:
        lines = _lines(path)
        steps = sorted(
            (event["ts"], event["dur"])
            for line in lines
            if _STEP in line
            for event in [json.loads(line.rstrip(","))]
            if event["pid"] == 1
        )
        for count in (_STEPS, 1):
            chosen = steps[max(0, len(steps) // 2 - count // 2) :][:count]
            if not chosen:
                return None
            begin, end = chosen[0][0], max(ts + dur for ts, dur in chosen)
            spans = _between(lines, begin, end)
            if len(spans) <= _MOST_SPANS:
                break
        return Excerpt(begin / 1e6, (end - begin) / 1e6, len(chosen), tuple(spans[:_MOST_SPANS]))
    except (OSError, EOFError, zlib.error, *NOT_A_RUN):
        return None  # none, half of one, or something else


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    lines = text.split("\n")
    # The last one may be cut.
    return [line for line in lines[:-1] if line.startswith('{"ph":"')]


@dataclass(slots=True)
class _Names:
    """What the trace calls its processes and threads, and in which order it shows these."""

    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event that names something."""
        row, about = (event["pid"], event["tid"]), event["args"]
        match event["name"]:
            case "process_name":
                self.processes[event["pid"]] = about["name"]
            case "thread_name":
                self.threads[row] = about["name"]
            case "thread_sort_index":
                self.places[row] = about["sort_index"]

    def place(self, event: Mapping[str, Any]) -> tuple[float, ...]:
        """Return where an event is drawn: rows in order, and by time; what lies around is first."""
        process, thread = event["pid"], event["tid"]
        place = self.places.get((process, thread), 0)
        return process, place, thread, event["ts"], -event["dur"]

    def of(self, row: tuple[int, int]) -> str:
        """Return what a row is called."""
        return f"{self.processes.get(row[0], row[0])}: {self.threads.get(row, row[1])}"


def _between(lines: Sequence[str], begin: float, end: float) -> list[TraceSpan]:
    """Return the spans of all rows that overlap with a time, in microseconds, cut to it."""
    names = _Names()
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith('{"ph":"M"'):
            names.take(json.loads(line.rstrip(",")))
        elif line.startswith('{"ph":"X"') and _begin(line) < end:
            event = json.loads(line.rstrip(","))
            if event["ts"] + event["dur"] > begin:
                found.append(event)
    spans: list[TraceSpan] = []
    ends: list[float] = []
    last = (0, 0)
    for event in sorted(found, key=names.place):
        row = event["pid"], event["tid"]
        if row != last:
            ends, last = [], row
        while ends and ends[-1] <= event["ts"] + _ROUNDING:
            ends.pop()
        first, after = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        spans.append(
            TraceSpan(
                names.of(row),
                str(event["name"]),
                (first - begin) / 1e6,
                (after - first) / 1e6,
                len(ends),
            )
        )
        ends.append(event["ts"] + event["dur"])
    return spans


def _begin(line: str) -> float:
    """Return when a span begins; reading all of it would take several times as long."""
    return float(line.partition('"ts":')[2].partition(",")[0])
