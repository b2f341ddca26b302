"""Stragglers (instances that other instances wait for), and the likely causes of slowness.

If instances train together, each step takes as long on every instance as on the slowest one.
Instances are therefore compared by the duration of a step without waiting for other instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from heapq import nlargest
from typing import Any

from poprun_py.display.formatting import bytes_text
from poprun_py.running.watch.instance_state import InstanceState, median

# A straggler's last _STEPS steps take more than _FACTOR times the median of all instances.
_FACTOR, _STEPS = 1.2, 10
# An instance is not slow if its steps exceed the median by fewer seconds than this.
_NOTICED_SECONDS = 0.5e-3
# A delay by the host is the likely cause if it explains more than this fraction of a straggler's
# excess time.
_EXPLAINS = 0.4
_CAUSES = {
    "other": "the program's own code takes longer",
    "computing": "it computes longer",
    "loading": "it loads data longer",
    "transferring": "its transfers take longer",
    "reducing": "its collectives take longer",
    "updating": "its update takes longer",
}
# The fields of a straggler whose JSON keys differ from their names.
_JSON_KEYS = {
    "own_seconds": "step_seconds_without_waiting",
    "median_seconds": "median_of_all",
    "is_slow": "is_straggler",
}
# The activities that do not count as work in a training step.
_NO_WORK = ("waiting", "compiling", "saving", "validating")


def _seconds(state: InstanceState, part: str) -> float:
    """Return the seconds of each step that an instance spends on ``part``.

    ``part`` is an activity, ``work`` for all work, or a delay (``throttled`` or ``queued``).
    """
    match part:
        case "work":
            share = 1.0 - state.share(*_NO_WORK)
        case "throttled":
            share = state.throttled
        case "queued":
            share = state.queued
        case _:
            share = state.share(part)
    return share * state.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A comparison of one instance with the other instances of its job.

    Attributes:
        own_seconds: The median duration of the instance's last ten steps, without waiting for other
            instances.
        median_seconds: The median of ``own_seconds`` over all instances of a job.
        is_slow: Whether the other instances lose a noticeable part of each step by waiting for this
            instance.
        cause: The likely cause of the slowness, such as ``it swaps``; empty if unknown.
        detail: The measured values that support ``cause``, as text; empty if the cause is unknown.
    """

    instance: int
    host: str = ""
    own_seconds: float
    median_seconds: float
    is_slow: bool
    cause: str = ""
    detail: str = ""

    @property
    def reason(self) -> str:
        """The cause of the slowness, followed by ``detail`` in parentheses."""
        return f"{self.cause} ({self.detail})" if self.detail else self.cause

    @property
    def sentence(self) -> str:
        """The sentence that reports the slow instance to the user."""
        where = f" on {self.host}" if self.host else ""
        reason = f": {self.reason}" if self.cause else ""
        return (
            f"instance {self.instance}{where} is slow: a step takes {self.own_seconds * 1e3:.3g} "
            f"ms without waiting for other instances, and {self.median_seconds * 1e3:.3g} ms in "
            f"the median instance{reason}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the straggler as JSON values."""
        return {
            _JSON_KEYS.get(name, name): round(value, 9) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Straggler:
        """Create a straggler from JSON values that ``to_json`` returned."""
        names = (field.name for field in fields(cls))
        return cls(**{name: data[_JSON_KEYS.get(name, name)] for name in names})


def stragglers(states: Sequence[InstanceState]) -> list[Straggler]:
    """Return the instances that others waited for in the last ten steps, slowest first.

    An instance is a straggler if its step exceeds the median step by more than 20 %, and if the
    other instances wait longer than this instance by more than 20 % of the median step. If the
    instance itself waits for a slower instance, both differences must exceed 20 % of its whole
    step. In a job of two instances, the step of the faster instance counts as the median step.
    """
    peers = _Peers(_comparable(states))
    # Only instances with long steps can be stragglers, so the other instances of a large job need
    # no further comparison.
    suspects = [each for each in peers.states if stands_out(each.own_seconds, peers.usual)]
    slow = [each for each in map(peers.straggler, suspects) if each.is_slow]
    return sorted(slow, key=lambda each: -each.own_seconds)


def stands_out(own: float, usual: float) -> bool:
    """Return whether a step of ``own`` seconds is noticeably longer than the median ``usual``."""
    return own - usual > max((_FACTOR - 1) * usual, _NOTICED_SECONDS)


def waited_for(steps: Mapping[int, tuple[float, float]]) -> frozenset[int]:
    """Return the instances that other instances wait for.

    ``steps`` maps each instance to two durations in seconds: the duration of a step without waiting
    for other instances, and the duration of the whole step.
    """
    usual = median([own for own, _ in steps.values()])
    waiting = {index: max(0.0, whole - own) for index, (own, whole) in steps.items()}
    least, of_others = min(waiting.values(), default=0.0), _median_of_others(waiting.values())
    found = set()
    for index, (own, _) in steps.items():
        lost = min(own - usual, of_others(waiting[index]) - waiting[index])
        if _costs_time(lost, usual, own, waiting[index] - least):
            found.add(index)
    return frozenset(found)


def slowest_by_medians(steps: Mapping[int, tuple[float, float]]) -> Straggler:
    """Return the instance whose steps are longest, not counting the time of waiting for others."""
    worst = max(steps, key=lambda instance: steps[instance][0])
    return Straggler(
        instance=worst,
        own_seconds=steps[worst][0],
        median_seconds=median([own for own, _ in steps.values()]),
        is_slow=worst in waited_for(steps),
    )


def _costs_time(lost: float, usual: float, own: float, waiting: float) -> bool:
    """Return whether waiting for an instance costs the other instances noticeable time per step.

    Args:
        lost: The seconds that the other instances lose in each step.
        usual: The seconds of the median instance's step without waiting.
        own: The seconds of this instance's step without waiting.
        waiting: The seconds that this instance waits in each step, less the seconds that the
            instance with the least waiting waits.
    """
    if not stands_out(usual + lost, usual):
        return False
    # If an instance itself waits for a slower instance, it is a straggler only if the other
    # instances lose a large part of its whole step.
    return not stands_out(own + waiting, own) or lost > (_FACTOR - 1) * (own + waiting)


def slowest(states: Sequence[InstanceState]) -> Straggler | None:
    """Return the instance with the longest steps without waiting; None if fewer than two train."""
    training = _comparable(states)
    if len(training) < 2:
        return None
    worst = max(training, key=lambda state: state.own_seconds)
    return _Peers(training).straggler(worst)


def _comparable(states: Sequence[InstanceState]) -> list[InstanceState]:
    return [state for state in states if state.num_steps >= _STEPS and state.own_seconds > 0]


def _median_of_others(values: Iterable[float]) -> Callable[[float], float]:
    """Return a function that takes one of ``values`` and returns the lower median of the rest."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    lower, upper = ordered[middle - 1 : middle + 1] if middle else (0.0, 0.0)
    return lambda value: upper if value <= lower else lower


class _Peers:
    """The instances of a job, with the median duration of each part of a step.

    The medians are cached, so that comparing all instances does not take quadratic time.
    """

    def __init__(self, states: Sequence[InstanceState]) -> None:
        self.states = states
        self.usual = median([state.own_seconds for state in states])
        self._medians: dict[str, Callable[[float], float]] = {}  # keyed by parts of a step
        self._least_waiting = min((_seconds(each, "waiting") for each in states), default=0.0)
        self._most_swapped = nlargest(2, (state.swap_bytes for state in states))

    def straggler(self, state: InstanceState) -> Straggler:
        excess = self._longer(state, "work")
        cause, detail = self._reason(state, excess) if excess > 0 else ("", "")
        waiting = _seconds(state, "waiting") - self._least_waiting
        # An instance with long steps is a straggler only if other instances wait for it. A busy
        # host may delay ten steps by chance, and instances that do not train together do not wait
        # for each other.
        lost = min(state.own_seconds - self.usual, excess, -self._longer(state, "waiting"))
        return Straggler(
            instance=state.index,
            host=state.host,
            own_seconds=state.own_seconds,
            median_seconds=self.usual,
            is_slow=_costs_time(lost, self.usual, state.own_seconds, waiting),
            cause=cause,
            detail=detail,
        )

    def _longer(self, state: InstanceState, part: str) -> float:
        """Return the seconds by which a part of a step exceeds the other instances' median."""
        if part not in self._medians:
            self._medians[part] = _median_of_others(_seconds(each, part) for each in self.states)
        value = _seconds(state, part)
        return value - self._medians[part](value)

    def _reason(self, state: InstanceState, excess: float) -> tuple[str, str]:
        """Return the likely cause of ``excess`` seconds per step, and values that support it.

        Swapping, throttling and shared CPUs are checked first, because they slow down every
        activity of an instance.
        """
        longer = partial(self._longer, state)
        most, second = [*self._most_swapped, 0, 0][:2]
        most_of_others = second if state.swap_bytes == most else most
        if state.swap_bytes > most_of_others:
            return "it swaps", f"{bytes_text(state.swap_bytes)} of its memory is on the disk"
        if longer("throttled") > _EXPLAINS * excess:
            detail = f"its control group had used up its CPU time {state.throttled:.0%} of the time"
            return "its host throttles it", detail
        if longer("queued") > _EXPLAINS * excess:
            return "it shares its CPUs", f"it waited for a CPU {state.queued:.0%} of the time"
        worst = max(_CAUSES, key=longer)
        return _CAUSES[worst], f"{state.share(worst):.0%} of its time"
