"""When micro-batches came to the device and went: what latencies and cycles are computed from.

They are the host's clock's, or what a model of the device says of every call alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from popdist_py.poptorch.calls.batching import Batching

__all__ = ["CallTimes", "Counters"]

# Cycles of the host's clock: its seconds times the clock of a Bow IPU, in hertz.
_CLOCK: Final = 1_850_000_000
_EVENTS: Final = ("input", "input_complete", "output", "output_complete")

Latency = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """What a model of the device says of every call.

    Attributes:
        times: for each event those of the micro-batches, in seconds from the call's beginning.
        cycles: of the call.
    """

    times: Mapping[str, Sequence[float]]
    cycles: int


class Counters:
    """Times of the last call, in seconds of an arbitrary clock.

    Args:
        batching: how many micro-batches a call has.
        num_inputs: input tensors of a call.
        num_outputs: output tensors of a call.
        synthetic: no tensors come or go, so there is nothing to time.
        modelled: what a model of the device says, if it decides; asked when first needed.
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

    @property
    def _shown(self) -> Mapping[str, Sequence[float]]:
        """The times that programs see: of no call yet, of the device's model, or the host's."""
        if self._modelled is None or not self._times["output"]:
            return self._times
        return self._modelled().times

    def as_dict(self) -> dict[str, list[list[float]]]:
        """Return the times by event, as [tensor][step], replicas innermost."""
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
        """Return minimum, maximum and mean of the time from event ``first`` to ``last``."""
        shown = self._shown
        spans = [end - start for start, end in zip(shown[first], shown[last], strict=True)]
        if self._synthetic or not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))

    def cycles(self) -> int | None:
        """Return the emulated cycles of the last call; None before one."""
        if not self._times["output"]:
            return None
        if self._modelled is not None:
            return self._modelled().cycles
        seconds = self._times["output_complete"][-1] - self._times["input"][0]
        return max(1, round(seconds * _CLOCK))
