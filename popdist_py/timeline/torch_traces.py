"""Traces that torch.profiler wrote, on the clock and in the rows of a job's timeline.

Only complete events are taken: what ran, in which thread. Nothing here runs the profiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from popdist_py.timeline.span_file import Span

__all__ = ["MAX_TORCH_BYTES", "MAX_TORCH_SPANS", "torch_spans"]

# Of one file: to read it takes ten times the memory.
MAX_TORCH_BYTES: Final = 1 << 28

# Of one trace: more would be hundreds of megabytes.
MAX_TORCH_SPANS: Final = 200_000


def torch_spans(text: str, wall_minus_monotonic: int) -> tuple[list[Span], int]:
    """Return the spans of a trace, and how many more it has.

    Args:
        text: what ``torch.profiler.profile.export_chrome_trace`` wrote.
        wall_minus_monotonic: nanoseconds; what the time of day is ahead of the monotonic clock on
            the host of the trace, whose times are of the day.

    Raises:
        ValueError: it is no such trace.
    """
    try:
        document = json.loads(text)
        events = document["traceEvents"]
        # Without a base (before torch 2.4) times count from 1970.
        base = int(document.get("baseTimeNanoseconds", 0)) - wall_minus_monotonic
        found = list(_complete(events, base))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no trace of torch.profiler: {error!r}") from None
    return found[:MAX_TORCH_SPANS], max(0, len(found) - MAX_TORCH_SPANS)


def _complete(events: list[dict[str, Any]], base: int) -> Iterator[Span]:
    threads = {
        (event.get("pid"), event.get("tid")): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    for event in events:
        if event.get("ph") == "X" and event.get("cat") not in (None, "Trace", "overhead"):
            begin = base + round(float(event["ts"]) * 1000)
            end = begin + round(float(event["dur"]) * 1000)
            thread = threads.get((event["pid"], event["tid"]), f"thread {event['tid']}")
            yield Span(str(event["name"]), f"torch {thread}", begin, end)
