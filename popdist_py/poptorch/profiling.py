"""Tracepoints of a program, and torch.profiler's traces, as parts of the job's timeline.

They are recorded where a timeline is (``--timeline``, ``PVTI_OPTIONS``), and cost next to nothing
else. Nothing here writes a trace.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from popdist_py.timeline import spans

__all__ = ["Channel", "into_timeline"]

Instrumented = TypeVar("Instrumented")


class Channel:
    """A named group of tracepoints: a row of the timeline.

    Args:
        name: of the row.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Make each call of some methods of ``obj`` a tracepoint; returns ``obj``.

        Args:
            obj: the object, which gets wrapped methods of its own while a timeline is recorded.
            methods: their names.

        Raises:
            AttributeError: it has no such method.
        """
        if spans.is_recording():
            for name in methods:
                setattr(obj, name, self.tracepoint(name)(getattr(obj, name)))
        return obj

    def tracepoint(self, name: str) -> spans.span:
        """Return what marks a block (``with``), or each call of a function (as its decorator)."""
        return spans.row_span(f"channel {self.name}", name)


def into_timeline(profiler: torch.profiler.profile) -> None:
    """Make a trace of torch.profiler part of the timeline, if one is recorded.

    For ``torch.profiler.profile(schedule=..., on_trace_ready=poptorch.profiling.into_timeline)``,
    whose schedule chooses the steps.
    """
    path = spans.torch_trace_path()
    if path is not None:
        profiler.export_chrome_trace(str(path))
