"""Hands a job's numbers to the process that writes them for TensorBoard or Weights & Biases.

At most once a second, and only if there was a training step: that is the axis of all charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from poprun_py.running.metrics.run_values import training_step, values_of
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord

# Looks come once a second, a little more or less.
_APART_SECONDS: Final = 0.9


class ChartRecorder:
    """The numbers of one attempt for the sinks.

    Args:
        send: takes a document; the first one says that an attempt begins.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], object]) -> None:
        self._send = send
        self._last_step: int | None = None
        self._last_at = float("-inf")
        send({"begins": True})

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Do nothing: a look has the medians of the last steps."""

    def view(self, view: JobView, at: float, /) -> None:
        """Hand over the numbers, if it is time; those of a job that has ended always."""
        step = training_step(view)
        if step is None or step == self._last_step:
            return
        has_ended = all(state.phase == "ended" for state in view.instances)
        if at - self._last_at < _APART_SECONDS and not has_ended:
            return
        self._last_step, self._last_at = step, at
        self._send({"step": step, "values": values_of(view)})
