"""A look at a job as numbers by name, for the charts of TensorBoard and Weights & Biases.

Pure. Names are ``what/of which instance``, so that one section of charts compares the instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from poprun_py.running.watch.instance_state import ACTIVITIES, InstanceState, median
from poprun_py.running.watch.job_view import JobView

# With more instances, charts show the least, the median and the greatest of all.
_MOST_INSTANCES: Final = 32
_OF_INSTANCES: Final[Mapping[str, Callable[[InstanceState], float | None]]] = {
    "loss": lambda state: state.loss,
    "step_seconds": lambda state: state.step_seconds if state.num_steps else None,
    "step_p95_seconds": lambda state: state.p95_seconds if state.num_steps else None,
    "step_own_seconds": lambda state: state.own_seconds if state.num_steps else None,
    "memory_bytes": lambda state: float(state.memory_bytes) or None,
}


def training_step(view: JobView) -> int | None:
    """Return the training step that all instances have done; None before the first."""
    steps = [state.step for state in view.instances if state.step is not None]
    return min(steps, default=0) or None


def values_of(view: JobView) -> dict[str, float]:
    """Return the numbers of a look by name; what is not known is left out."""
    states = view.instances
    values: dict[str, float] = {}
    if view.samples_per_second:
        values["samples_per_second/total"] = view.samples_per_second
    losses = [state.loss for state in states if state.loss is not None]
    if losses:
        values["loss/mean"] = sum(losses) / len(losses)
    for name, number_of in _OF_INSTANCES.items():
        numbers = {
            state.index: number for state in states if (number := number_of(state)) is not None
        }
        values.update(_by_instance(name, numbers, len(states)))
    known = [state for state in states if any(state.shares)]
    by_activity = zip(*(state.shares for state in known), strict=True)
    for activity, shares in zip(ACTIVITIES, by_activity, strict=False):
        values[f"share_of_time/{activity}"] = sum(shares) / len(shares)
    return values


def _by_instance(name: str, numbers: Mapping[int, float], num_instances: int) -> dict[str, float]:
    """Return the number of each instance, or of many what spans them."""
    if num_instances <= _MOST_INSTANCES:
        return {f"{name}/instance-{index}": number for index, number in numbers.items()}
    if not numbers:
        return {}
    every = list(numbers.values())
    spanned = {"least": min(every), "median": median(every), "greatest": max(every)}
    return {f"{name}/{which}": number for which, number in spanned.items()}
