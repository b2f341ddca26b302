"""Tracepoints of a program, and traces of torch.profiler, as parts of the job's timeline.

The option ``--timeline`` or the environment variable ``PVTI_OPTIONS`` starts recording a timeline.
Without a timeline, tracepoints take almost no time. Other modules write the files of the timeline.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from popdist_py.timeline import spans

__all__ = ["Channel", "into_timeline"]

Instrumented = TypeVar("Instrumented")


class Channel:
    """A named group of tracepoints, which is a row of the timeline.

    Args:
        name: The name of the row.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Record each call of some methods of an object as a tracepoint, and return the object.

        Args:
            obj: The object, whose methods are replaced with wrapped methods if a timeline is
                recorded.
            *methods: The names of the methods.

        Raises:
            AttributeError: A timeline is recorded, and the object lacks one of the methods.
        """
        if spans.is_recording():
            for name in methods:
                setattr(obj, name, self.tracepoint(name)(getattr(obj, name)))
        return obj

    def tracepoint(self, name: str) -> spans.span:
        """Return a tracepoint, for use as a context manager or as a decorator of a function."""
        return spans.row_span(f"channel {self.name}", name)


def into_timeline(profiler: torch.profiler.profile) -> None:
    """Add a trace of torch.profiler to the timeline, if a timeline is recorded.

    Pass this function to torch.profiler, whose schedule chooses the steps:
    ``torch.profiler.profile(schedule=..., on_trace_ready=poptorch.profiling.into_timeline)``.
    """
    path = spans.torch_trace_path()
    if path is not None:
        profiler.export_chrome_trace(str(path))
