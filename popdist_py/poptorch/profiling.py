"""Tracepoints of a program, and traces of torch.profiler, as parts of the job's timeline.

The option ``--timeline`` or the environment variable ``PVTI_OPTIONS`` starts the recording of a
timeline. While no timeline is recorded, a tracepoint takes almost no time. Other modules write the
timeline to files.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from popdist_py.timeline import spans

__all__ = ["Channel", "into_timeline"]

Instrumented = TypeVar("Instrumented")


class Channel:
    """A named group of tracepoints, shown as one row of the timeline.

    Args:
        name: The name of the group of tracepoints, and of its row in the timeline.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Make each call of the given methods of an object a tracepoint, and return the object.

        Args:
            obj: The object whose methods become tracepoints. If a timeline is recorded, wrappers
                replace the methods of the object.
            *methods: The names of the methods to record in the timeline.

        Raises:
            AttributeError: A timeline is recorded, and the object does not have one of the methods.
        """
        if spans.is_recording():
            for name in methods:
                setattr(obj, name, self.tracepoint(name)(getattr(obj, name)))
        return obj

    def tracepoint(self, name: str) -> spans.span:
        """Return a tracepoint (timed span) to use as a context manager or function decorator."""
        return spans.row_span(f"channel {self.name}", name)


def into_timeline(profiler: torch.profiler.profile) -> None:
    """Add the trace of a torch.profiler profile to the timeline, if a timeline is recorded.

    Pass ``into_timeline`` to torch.profiler, whose schedule chooses the recorded steps, as in
    ``torch.profiler.profile(schedule=..., on_trace_ready=poptorch.profiling.into_timeline)``.
    """
    path = spans.torch_trace_path()
    if path is not None:
        profiler.export_chrome_trace(str(path))
