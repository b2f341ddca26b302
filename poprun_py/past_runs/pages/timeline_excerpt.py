"""A chart of a few training steps from the middle of a run's timeline (``timeline.json.gz``).

Of a large trace, only the first part is read, with the spans of the first instances. Each line of a
trace is an event in the format of popdist_py/timeline/trace_events.py.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from popdist_py.html_pages.chart_colours import NEUTRAL, NUM_COLOURS, series_colour
from popdist_py.html_pages.charts import bars, plotly_text
from popdist_py.html_pages.page import Chart, Section, Sentence
from poprun_py.display.formatting import duration_text, milliseconds_text
from poprun_py.past_runs.recorded_run import DAMAGE_ERRORS

# The largest number of uncompressed bytes (about 80,000 spans) to read from a trace.
_MOST_BYTES: Final = 8 << 20
_STEPS, _MOST_SPANS = 3, 1500
_STEP: Final = '"name":"step"'
# If two spans overlap by at most this many microseconds, they count as consecutive, because the
# times of spans are rounded.
_ROUNDING: Final = 0.01
# The thickness of a bar in the timeline chart, the amount by which each enclosing span makes a bar
# thinner, and the smallest thickness of a bar.
_THICK, _THINNER, _THIN = 0.86, 0.24, 0.2
_MOST_ROWS: Final = 40


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span (timed activity) of an excerpt; times in seconds since the start of the excerpt.

    Attributes:
        row: The names of the process and the thread that recorded the span.
        depth: The number of spans that enclose this span.
    """

    row: str
    name: str
    begin: float
    seconds: float
    depth: int


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a trace that starts ``at`` seconds after the start of the trace.

    The spans of the excerpt are sorted by row and start.
    """

    at: float
    seconds: float
    num_steps: int
    spans: tuple[TraceSpan, ...]


# --- reading a trace ----------------------------------------------------------------------------


def read_excerpt(path: Path) -> Excerpt | None:
    """Return an excerpt from the middle of a trace; None if the trace or its steps are missing."""
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
            spans = _spans_between(lines, begin, end)
            if len(spans) <= _MOST_SPANS:
                break
        return Excerpt(begin / 1e6, (end - begin) / 1e6, len(chosen), tuple(spans[:_MOST_SPANS]))
    except (OSError, EOFError, zlib.error, *DAMAGE_ERRORS):
        return None  # the trace file is missing, incomplete, or damaged


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    lines = text.split("\n")
    # Leave out the last line of the text, because its end may not have been read.
    return [line for line in lines[:-1] if line.startswith('{"ph":"')]


def _spans_between(lines: Sequence[str], begin: float, end: float) -> list[TraceSpan]:
    """Return the spans between ``begin`` and ``end`` (microseconds), clipped to this interval."""
    # The metadata of the trace, keyed by kind, process and thread, such as ("thread_name", 1, 3).
    metadata: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith('{"ph":"M"'):
            event = json.loads(line.rstrip(","))
            metadata[event["name"], event["pid"], event["tid"]] = event["args"]
        elif line.startswith('{"ph":"X"') and _start_of(line) < end:
            event = json.loads(line.rstrip(","))
            if event["ts"] + event["dur"] > begin:
                found.append(event)

    def order(event: Mapping[str, Any]) -> tuple[float, ...]:
        """Return a key that sorts spans by row and start, outer spans before inner spans."""
        process, thread = event["pid"], event["tid"]
        position = metadata.get(("thread_sort_index", process, thread), {}).get("sort_index", 0)
        return process, position, thread, event["ts"], -event["dur"]

    spans: list[TraceSpan] = []
    for (process, thread), events in groupby(sorted(found, key=order), itemgetter("pid", "tid")):
        of_process = metadata.get(("process_name", process, 0), {}).get("name", process)
        of_thread = metadata.get(("thread_name", process, thread), {}).get("name", thread)
        row = f"{of_process}: {of_thread}"
        ends: list[float] = []  # the end times of the spans that enclose the next span
        for event in events:
            after = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + _ROUNDING:
                ends.pop()
            first, last = max(begin, event["ts"]), min(end, after)
            start, seconds = (first - begin) / 1e6, (last - first) / 1e6
            spans.append(TraceSpan(row, str(event["name"]), start, seconds, len(ends)))
            ends.append(after)
    return spans


def _start_of(line: str) -> float:
    """Return the start time of the span in a line of a trace, without slow JSON parsing."""
    return float(line.partition('"ts":')[2].partition(",")[0])


# --- drawing an excerpt -------------------------------------------------------------------------


def timeline_section(excerpt: Excerpt, trace: Path) -> Section:
    """Return a page section with a chart of the excerpt and the path of the whole trace."""
    rows = list(dict.fromkeys(span.row for span in excerpt.spans))
    whole = Sentence(f"The whole timeline is {trace}: open it at ui.perfetto.dev.")
    return Section("Timeline", (_chart(excerpt, rows[:_MOST_ROWS]), whole))


def _chart(excerpt: Excerpt, rows: list[str]) -> Chart:
    steps = f"{excerpt.num_steps} steps" if excerpt.num_steps > 1 else "one step"
    summary = (
        f"The chart shows {steps} of instance 0 from the middle of the timeline. The excerpt is "
        f"{milliseconds_text(excerpt.seconds)} long, and begins {duration_text(excerpt.at)} after "
        "the start of the timeline."
    )
    empty = bars("Some steps", summary, rows, [], unit="ms")
    shown = set(rows)
    by_name: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for span in excerpt.spans:
        if span.row in shown:
            by_name[span.name].append(span)
    ranked = sorted(by_name, key=lambda name: -sum(span.seconds for span in by_name[name]))
    # Inner spans are drawn after the spans around them, so that the inner spans are not covered.
    drawn = sorted(ranked, key=lambda name: min(span.depth for span in by_name[name]))
    data = [_trace(name, by_name[name], ranked.index(name)) for name in drawn]
    layout = {**empty.figure["layout"], "barmode": "overlay", "hovermode": "closest"}
    layout["showlegend"] = True
    layout["yaxis"] = {
        **layout["yaxis"],
        "categoryorder": "array",
        "categoryarray": [plotly_text(row) for row in rows],
        "showgrid": True,
    }
    layout["xaxis"] = {**layout["xaxis"], "range": [0, excerpt.seconds * 1e3]}
    return Chart(empty.title, empty.summary, {"data": data, "layout": layout}, empty.height)


def _trace(name: str, spans: list[TraceSpan], rank: int) -> dict[str, Any]:
    is_other = name == "step" or rank >= 2 * NUM_COLOURS
    return {
        "type": "bar",
        "name": plotly_text(name),
        "orientation": "h",
        "base": [round(span.begin * 1e3, 4) for span in spans],
        "x": [round(span.seconds * 1e3, 4) for span in spans],
        "y": [plotly_text(span.row) for span in spans],
        "width": [max(_THIN, _THICK - _THINNER * span.depth) for span in spans],
        "marker": {
            "color": NEUTRAL if is_other else series_colour(rank),
            "pattern": {"shape": "/" if rank >= NUM_COLOURS and not is_other else ""},
            "line": {"width": 0},
        },
        "hovertemplate": "%{y}<br>%{x:.4~g} ms",
    }
