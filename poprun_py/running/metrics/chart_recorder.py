"""The recorder that sends metrics to the child process for TensorBoard or Weights & Biases.

Each metric has a name such as ``loss/instance-0``, so one section of charts compares the instances.
The training step is the axis of all charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from poprun_py.running.watch.instance_state import ACTIVITIES, InstanceState, median
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord

# The smallest number of seconds between two documents. Periodic views are at least one second
# apart, so each of them is sent.
_APART_SECONDS: Final = 0.9
# With more instances than this, charts show the least, the median and the greatest value of all
# instances, not one value for each.
_MOST_INSTANCES: Final = 32
_INSTANCE_VALUES: Final[Mapping[str, Callable[[InstanceState], float | None]]] = {
    "loss": lambda state: state.loss,
    "step_seconds": lambda state: state.step_seconds if state.num_steps else None,
    "step_p95_seconds": lambda state: state.p95_seconds if state.num_steps else None,
    "step_own_seconds": lambda state: state.own_seconds if state.num_steps else None,
    "memory_bytes": lambda state: float(state.memory_bytes) or None,
}


class ChartRecorder:
    """Sends the metrics of one attempt after new training steps, at most once per second.

    Args:
        send: A function that sends a document to the child process. The first document announces
            the attempt.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], object]) -> None:
        self._send = send
        self._last_step: int | None = None
        self._last_at = float("-inf")
        send({"begins": True})

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Do nothing with single steps, because views include the medians of the last steps."""

    def view(self, view: JobView, at: float, /) -> None:
        """Send the metrics of a view, unless metrics were sent less than a second ago.

        After the end of the job, the metrics of the last view are always sent.
        """
        step = training_step(view)
        if step is None or step == self._last_step:
            return
        has_ended = all(state.phase == "ended" for state in view.instances)
        if at - self._last_at < _APART_SECONDS and not has_ended:
            return
        self._last_step, self._last_at = step, at
        self._send({"step": step, "values": chart_values(view)})


def training_step(view: JobView) -> int | None:
    """Return the last training step that all instances have completed; None before step 1."""
    steps = [state.step for state in view.instances if state.step is not None]
    return min(steps, default=0) or None


def chart_values(view: JobView) -> dict[str, float]:
    """Return the metrics of a view, keyed by their names, without unknown values."""
    states = view.instances
    values: dict[str, float] = {}
    if view.samples_per_second:
        values["samples_per_second/total"] = view.samples_per_second
    losses = [state.loss for state in states if state.loss is not None]
    if losses:
        values["loss/mean"] = sum(losses) / len(losses)
    for name, value_of in _INSTANCE_VALUES.items():
        numbers = {
            state.index: number for state in states if (number := value_of(state)) is not None
        }
        values.update(_by_instance(name, numbers, len(states)))
    known = [state.shares for state in states if any(state.shares)]
    for position, activity in enumerate(ACTIVITIES if known else ()):
        total = sum([shares[position] for shares in known])
        values[f"share_of_time/{activity}"] = total / len(known)
    return values


def _by_instance(name: str, numbers: Mapping[int, float], num_instances: int) -> dict[str, float]:
    """Return a metric of each instance, or its range and median if there are many instances."""
    if num_instances <= _MOST_INSTANCES:
        return {f"{name}/instance-{index}": number for index, number in numbers.items()}
    if not numbers:
        return {}
    every = list(numbers.values())
    return {
        f"{name}/least": min(every),
        f"{name}/median": median(every),
        f"{name}/greatest": max(every),
    }
