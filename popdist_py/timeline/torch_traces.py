"""Conversion of traces from torch.profiler to spans of a job's timeline.

This module reads only the complete events of a trace, which have a start time, a duration and a
thread. This module does not run the profiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from popdist_py.timeline.span_file import Span

# The size of the largest trace file that is read. Reading a trace file takes ten times its size in
# memory.
MAX_TORCH_BYTES: Final = 1 << 28

# The largest number of spans from one trace. More spans would take hundreds of megabytes of memory.
MAX_TORCH_SPANS: Final = 200_000


def torch_spans(text: str, wall_minus_monotonic: int) -> tuple[list[Span], int]:
    """Return the spans of a trace, and the number of spans that were left out.

    Args:
        text: The text that ``torch.profiler.profile.export_chrome_trace`` wrote.
        wall_minus_monotonic: The difference between the time of day and the monotonic clock on the
            host of the trace, in nanoseconds. All times in the trace are times of day.

    Raises:
        ValueError: The text is not a trace of torch.profiler.
    """
    try:
        document = json.loads(text)
        events = document["traceEvents"]
        # Traces of torch before 2.4 do not contain a base time. Times in such traces count from
        # 1970.
        base = int(document.get("baseTimeNanoseconds", 0)) - wall_minus_monotonic
        found = list(_complete(events, base))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the file is not a trace of torch.profiler: {error!r}") from None
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
