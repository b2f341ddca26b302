"""The start and end times of each micro-batch in a model's call, and latencies and cycle counts.

The times of the micro-batches are either measured with the host's clock or computed by the device
model (a model of an IPU's speed). The times that the device model computes are the same for every
call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from popdist_py.poptorch.calls.batching import Batching

__all__ = ["CallTimes", "Counters"]

# The clock frequency of a Bow IPU in hertz. Measured seconds multiplied by the clock frequency are
# reported as cycles.
_CLOCK: Final = 1_850_000_000
_EVENTS: Final = ("input", "input_complete", "output", "output_complete")

Latency = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of a call that the device model (a model of an IPU's speed) computes.

    Attributes:
        times: For each event such as ``input`` (the inputs of a micro-batch arrive), the times of
            the event in all micro-batches, in seconds after the beginning of the call.
        cycles: The number of IPU clock cycles that the call takes.
    """

    times: Mapping[str, Sequence[float]]
    cycles: int


class Counters:
    """The times of the micro-batches in the last call of a model, in seconds.

    Args:
        batching: The batching factors of the model.
        num_inputs: The number of input tensors of a call.
        num_outputs: The number of output tensors of a call.
        synthetic: Whether the inputs are synthetic data. With synthetic data, no transfer times are
            reported, because inputs are not transferred.
        modelled: A function that computes the times of a call with the device model (a model of an
            IPU's speed); None to measure the times. ``Counters`` calls ``modelled`` at most once.
    """

    def __init__(
        self,
        batching: Batching,
        num_inputs: int,
        num_outputs: int,
        *,
        synthetic: bool,
        modelled: Callable[[], CallTimes] | None = None,
    ) -> None:
        self._batching = batching
        self._num_tensors = {"input": num_inputs, "output": num_outputs}
        self._synthetic = synthetic
        self._modelled = None if modelled is None else cache(modelled)
        self._times: dict[str, list[float]] = {event: [] for event in _EVENTS}

    def begin(self) -> None:
        """Delete the times of the model's previous call, because a new call begins."""
        self._times = {event: [] for event in _EVENTS}

    def input(self, step: int) -> None:
        """Record the current time as the arrival of the inputs of micro-batch ``step``."""
        self._times["input"].append(time.perf_counter())
        self._times["input_complete"].append(time.perf_counter())

    def output(self, step: int) -> None:
        """Record the current time as the end of micro-batch ``step``."""
        self._times["output"].append(time.perf_counter())
        self._times["output_complete"].append(time.perf_counter())

    @property
    def _shown(self) -> Mapping[str, Sequence[float]]:
        """The times from the device model, or the measured times if no device model is used.

        Before the first call of the model, all lists of times are empty.
        """
        if self._modelled is None or not self._times["output"]:
            return self._times
        return self._modelled().times

    def as_dict(self) -> dict[str, list[list[float]]]:
        """Return one list of times for each event, such as ``input``, and each tensor.

        The list of a tensor contains one time for each replica in each micro-batch. The times of
        the first micro-batch on all replicas are at the beginning of the list.
        """
        result = {}
        shown = self._shown
        for event in _EVENTS:
            kind = event.split("_")[0]
            steps = list(shown[event])
            if kind == "output":
                steps = [t for step, t in enumerate(steps) if self._batching.wanted(step)]
                if len(steps) * self._batching.replicas > self._batching.num_returned:
                    steps = steps[-1:]
            values = [t for t in steps for _ in range(self._batching.replicas)]
            copies = max(1, self._num_tensors[kind])
            result[event] = [[] if self._synthetic else list(values) for _ in range(copies)]
        return result

    def latency(self, first: str, last: str) -> Latency:
        """Return the minimum, maximum and mean time from event ``first`` to event ``last``."""
        shown = self._shown
        spans = [end - start for start, end in zip(shown[first], shown[last], strict=True)]
        if self._synthetic or not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))

    def cycles(self) -> int | None:
        """Return the emulated cycles of the last call; None before the first call."""
        if not self._times["output"]:
            return None
        if self._modelled is not None:
            return self._modelled().cycles
        seconds = self._times["output_complete"][-1] - self._times["input"][0]
        return max(1, round(seconds * _CLOCK))
