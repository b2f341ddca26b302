"""When micro-batches came to the device and went: what latencies and cycles are computed from."""

from __future__ import annotations

import time
from typing import Final

from popdist_py.poptorch.calls.batching import Batching

__all__ = ["Counters"]

# Cycles are emulated: seconds on the host times the clock of a Mk2 IPU, in hertz.
_CLOCK: Final = 1_850_000_000
_EVENTS: Final = ("input", "input_complete", "output", "output_complete")

Latency = tuple[float, float, float]


class Counters:
    """Times of the last call, in seconds of an arbitrary clock.

    Args:
        batching: how many micro-batches a call has.
        num_inputs: input tensors of a call.
        num_outputs: output tensors of a call.
        synthetic: no tensors come or go, so there is nothing to time.
    """

    def __init__(
        self, batching: Batching, num_inputs: int, num_outputs: int, *, synthetic: bool
    ) -> None:
        self._batching = batching
        self._num_tensors = {"input": num_inputs, "output": num_outputs}
        self._synthetic = synthetic
        self._times: dict[str, list[float]] = {event: [] for event in _EVENTS}

    def begin(self) -> None:
        """Forget the last call."""
        self._times = {event: [] for event in _EVENTS}

    def input(self, step: int) -> None:
        """Note that micro-batch ``step`` arrives."""
        self._times["input"].append(time.perf_counter())
        self._times["input_complete"].append(time.perf_counter())

    def output(self, step: int) -> None:
        """Note that micro-batch ``step`` is done."""
        self._times["output"].append(time.perf_counter())
        self._times["output_complete"].append(time.perf_counter())

    def as_dict(self) -> dict[str, list[list[float]]]:
        """Return the times by event, as [tensor][step], replicas innermost."""
        result = {}
        for event in _EVENTS:
            kind = event.split("_")[0]
            steps = self._times[event]
            if kind == "output":
                steps = [t for step, t in enumerate(steps) if self._batching.wanted(step)]
                if len(steps) * self._batching.replicas > self._batching.num_returned:
                    steps = steps[-1:]
            values = [t for t in steps for _ in range(self._batching.replicas)]
            copies = max(1, self._num_tensors[kind])
            result[event] = [[] if self._synthetic else list(values) for _ in range(copies)]
        return result

    def latency(self, first: str, last: str) -> Latency:
        """Return minimum, maximum and mean of the time from event ``first`` to ``last``."""
        spans = [
            end - start for start, end in zip(self._times[first], self._times[last], strict=True)
        ]
        if self._synthetic or not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))

    def cycles(self) -> int | None:
        """Return the emulated cycles of the last call; None before one."""
        if not self._times["output"]:
            return None
        seconds = self._times["output_complete"][-1] - self._times["input"][0]
        return max(1, round(seconds * _CLOCK))
