"""Several back ends that compute the same, tried in the first steps of a training or inference.

Every step that is timed is a step of the program, and its results count. Which back ends agree is
decided before, while compiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.replicas import Outputs, Replicas

__all__ = ["FastestReplicas"]

# Each back end runs so many accumulation windows before the next one does. An even number: each
# meets the windows with and those without early reductions, which are being tried meanwhile.
_WINDOWS: Final = 2
# The first window of each warms up. Those that are slower by this factor are out after one turn;
# the others have more turns, unless one turn of all took long, in seconds.
_CLOSE: Final = 1.5
_TURNS, _LONG_SECONDS = 3, 1.0


class FastestReplicas:
    """Runs replicas in the fastest way, once it is found.

    Args:
        candidates: the back ends by name; the first one runs first.
        window: micro-batches of an accumulation window; a back end runs whole windows.
        slowest: returns the largest of each number over all instances, which all call it at once.
        on_change: called at the beginning of a window that another back end runs.
        on_settled: told the name and the seconds of a window by name, once the choice is made.

    Attributes:
        names: of the candidates.
        back_end: the name of what runs from now on; None while it is being found.
    """

    def __init__(
        self,
        candidates: Mapping[str, Replicas],
        *,
        window: int = 1,
        slowest: Callable[[Sequence[float]], Sequence[float]] = list,
        on_change: Callable[[], None] = lambda: None,
        on_settled: Callable[[str, Mapping[str, float]], None] = lambda *_: None,
    ) -> None:
        self._candidates = dict(candidates)
        self.names = tuple(candidates)
        self._window = window
        self._on_change = on_change
        self._trial = _trial(self.names, slowest, on_settled)
        first = next(self._trial)
        self._current = self._candidates[first]
        self.back_end: str | None = None
        # Of the window that runs: how many micro-batches ended, and in how many seconds.
        self._ended, self._seconds = 0, 0.0
        if len(self._candidates) == 1:
            self._settle(first)

    @property
    def needs_context(self) -> bool:
        """Whether ``run`` has to be called inside the model's context."""
        if self.back_end is not None:
            return self._current.needs_context
        return any(replicas.needs_context for replicas in self._candidates.values())

    def begin_window(self) -> None:
        """Choose what runs the accumulation window that begins.

        A window that an error ended early tells nothing: the same back end has another one.
        """
        if self.back_end is not None:
            return
        if self._ended == self._window:
            self._end_window()
        self._ended, self._seconds = 0, 0.0

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run one micro-batch on each local replica."""
        if self.back_end is not None:
            return self._current.run(call, inputs, number, scale)
        start = time.perf_counter()
        outputs = self._current.run(call, inputs, number, scale)
        self._seconds += time.perf_counter() - start
        self._ended += 1
        return outputs

    def _end_window(self) -> None:
        before = self._current
        try:
            # No collective of the next window has begun, so that instances may talk.
            self._current = self._candidates[self._trial.send(self._seconds)]
        except StopIteration as end:
            self._settle(end.value)
        if self._current is not before:
            self._on_change()

    def _settle(self, name: str) -> None:
        """Run this one from now on, and let go of the others: a graph holds memory."""
        self.back_end = name
        self._current = self._candidates[name]
        self._candidates = {name: self._current}


def _trial(
    names: Sequence[str],
    slowest: Callable[[Sequence[float]], Sequence[float]],
    on_settled: Callable[[str, Mapping[str, float]], None],
) -> Generator[str, float, str]:
    """Yield the name of what runs the next window, sent the seconds of it; return the best."""
    left = list(names)
    times: dict[str, float] = {}
    for turn in range(_TURNS):
        for name in left:
            for window in range(_WINDOWS):
                seconds = yield name
                if turn or window:
                    # What disturbs a window only makes it longer.
                    times[name] = min(seconds, times.get(name, float("inf")))
        together = slowest([times[name] for name in left])
        times.update(zip(left, together, strict=True))
        best = min(left, key=times.__getitem__)
        left = [name for name in left if times[name] <= _CLOSE * times[best]]
        if len(left) == 1 or sum(together) > _LONG_SECONDS:
            break
    on_settled(best, times)
    return best
