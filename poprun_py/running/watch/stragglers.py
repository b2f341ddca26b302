"""Stragglers: the instances that the others wait for, and the likely reasons.

Pure. Instances that train in step all take as long as the slowest one: what tells them apart is the
time of a step in which they do not wait for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Final

from poprun_py.running.watch.instance_state import ACTIVITIES, InstanceState, median

# Slower than the median by this factor, over this many steps.
_FACTOR, _STEPS = 1.2, 10
# Less than this in a step is nothing that anybody would wait for.
_NOTICED_SECONDS = 0.5e-3
# The part of what a step takes too long that a reason has to explain.
_EXPLAINS = 0.4
_CAUSES = {
    "other": "the program's own code takes longer",
    "computing": "it computes longer",
    "loading": "it loads data longer",
    "transferring": "its transfers take longer",
    "reducing": "its collectives take longer",
    "updating": "its update takes longer",
}
# Neither is work of a step.
_NO_WORK = ("waiting", "compiling", "saving", "validating")


def _seconds_of(activity: int) -> Callable[[InstanceState], float]:
    return lambda state: state.shares[activity] * state.step_seconds


# How to compute the seconds of each part of an instance's step.
_PARTS: Final[Mapping[str, Callable[[InstanceState], float]]] = {
    "work": lambda state: (1.0 - state.share(*_NO_WORK)) * state.step_seconds,
    "throttled": lambda state: state.throttled * state.step_seconds,
    "queued": lambda state: state.queued * state.step_seconds,
    **{name: _seconds_of(activity) for activity, name in enumerate(ACTIVITIES)},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """The instance that others wait for: its step without waiting, the median one, and why.

    The times are those of the last ten steps. ``is_slow`` tells whether they differ by so much, and
    over all the time between two looks, that others wait for it. ``cause`` says why in general,
    ``detail`` in numbers; both are empty where nothing shows it.
    """

    instance: int
    host: str
    own_seconds: float
    median_seconds: float
    is_slow: bool
    cause: str = ""
    detail: str = ""

    @property
    def reason(self) -> str:
        """Why, in words and numbers."""
        return f"{self.cause} ({self.detail})" if self.detail else self.cause

    @property
    def sentence(self) -> str:
        """The line of the log that names it."""
        where = f" on {self.host}" if self.host else ""
        reason = f": {self.reason}" if self.cause else ""
        return (
            f"instance {self.instance}{where} is slow: {self.own_seconds * 1e3:.3g} ms a step "
            f"without waiting for others, the median is {self.median_seconds * 1e3:.3g} ms{reason}"
        )


def stragglers(states: Sequence[InstanceState]) -> list[Straggler]:
    """Return the instances that others wait for, over ten steps; the slowest comes first.

    An instance is among them if its step is more than 20 % longer than the median one, and the
    others wait longer than it by as much. If the instance also waits for an even slower one, the
    difference must be more than 20 % of its whole step. The median is the lower one: of two
    instances, that of the faster.
    """
    peers = _Peers(_comparable(states))
    # Only these can be slow. In a large job, this spares a closer look at nearly all instances.
    suspects = [each for each in peers.states if stands_out(each.own_seconds, peers.usual)]
    slow = [each for each in map(peers.straggler, suspects) if each.is_slow]
    return sorted(slow, key=lambda each: -each.own_seconds)


def stands_out(own: float, usual: float) -> bool:
    """Return whether a step takes so much longer than the median one that others wait for it.

    Args:
        own: seconds of a step without waiting for others.
        usual: those of the median instance.
    """
    return own - usual > max((_FACTOR - 1) * usual, _NOTICED_SECONDS)


def waited_for(steps: Mapping[int, tuple[float, float]]) -> frozenset[int]:
    """Return the instances that others wait for.

    Args:
        steps: for each instance, the seconds of a step without waiting for others, and the seconds
            of the whole step.
    """
    usual = median([own for own, _ in steps.values()])
    waiting = {index: max(0.0, whole - own) for index, (own, whole) in steps.items()}
    least, medians = min(waiting.values(), default=0.0), _medians_without_one(waiting.values())

    def is_waited_for(own: float, own_waiting: float) -> bool:
        others = medians[1] if own_waiting <= medians[0] else medians[0]
        lost = min(own - usual, others - own_waiting)
        return _costs_time(lost, usual, own, own_waiting - least)

    return frozenset(
        index for index, (own, _) in steps.items() if is_waited_for(own, waiting[index])
    )


def _costs_time(lost: float, usual: float, own: float, waiting: float) -> bool:
    """Return whether the others lose a noticeable part of each step to an instance.

    Args:
        lost: seconds of a step that the others lose. The step of this instance is longer than the
            usual one by at least as much, and the others wait longer by at least as much.
        usual: seconds of the median instance's step without waiting.
        own: seconds of this instance's step without waiting.
        waiting: seconds by which it waits longer than the instance that waits least.
    """
    if not stands_out(usual + lost, usual):
        return False
    # An instance that itself waits for a slower one counts only if it would be nearly as much in
    # the way: if the loss is large compared with its whole step.
    return not stands_out(own + waiting, own) or lost > (_FACTOR - 1) * (own + waiting)


def slowest(states: Sequence[InstanceState]) -> Straggler | None:
    """Return the instance whose steps take longest without waiting; None of fewer than two."""
    training = _comparable(states)
    if len(training) < 2:
        return None
    worst = max(training, key=lambda state: state.own_seconds)
    return _Peers(training).straggler(worst)


def _comparable(states: Sequence[InstanceState]) -> list[InstanceState]:
    """Return the instances that have made enough steps."""
    return [state for state in states if state.num_steps >= _STEPS and state.own_seconds > 0]


class _Peers:
    """The instances of a job, for comparing each of them with all others.

    The durations of a part of a step are sorted once, not again for each instance. Otherwise the
    time for comparing all would grow with the square of their number.
    """

    def __init__(self, states: Sequence[InstanceState]) -> None:
        self.states = states
        self.usual = median([state.own_seconds for state in states])
        self._medians: dict[str, tuple[float, float]] = {}
        self._least_waiting = min(map(_PARTS["waiting"], states), default=0.0)
        self._most_swapped = nlargest(2, (state.swap_bytes for state in states))

    def straggler(self, state: InstanceState) -> Straggler:
        """Compare one instance with the others."""
        longer = partial(self._longer, state)
        excess = longer("work")
        cause, detail = self._reason(state, excess) if excess > 0 else ("", "")
        waiting = _PARTS["waiting"](state) - self._least_waiting
        # A long step alone does not suffice: ten steps may fall on a bad moment of a busy host, and
        # instances that do not train together do not wait for the slowest one.
        lost = min(state.own_seconds - self.usual, excess, -longer("waiting"))
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
        """Return by how many seconds a part of a step exceeds the median of the other instances."""
        seconds_of = _PARTS[part]
        if (medians := self._medians.get(part)) is None:
            medians = self._medians[part] = _medians_without_one(map(seconds_of, self.states))
        value = seconds_of(state)
        return value - (medians[1] if value <= medians[0] else medians[0])

    def _reason(self, state: InstanceState, excess: float) -> tuple[str, str]:
        """Return why an instance takes longer by ``excess``, and the numbers that show it.

        Time that the host takes from the instance is checked first, because it prolongs every
        activity.
        """
        longer = partial(self._longer, state)
        most, second = [*self._most_swapped, 0, 0][:2]
        if state.swap_bytes > (second if state.swap_bytes == most else most):
            return "it swaps", f"{state.swap_bytes / 2**20:.0f} MiB of it are on the disk"
        if longer("throttled") > _EXPLAINS * excess:
            detail = f"its control group had used up its CPU time {state.throttled:.0%} of the time"
            return "its host throttles it", detail
        if longer("queued") > _EXPLAINS * excess:
            return "it shares its CPUs", f"it waited for one {state.queued:.0%} of the time"
        worst = max(_CAUSES, key=longer)
        return _CAUSES[worst], f"{state.share(worst):.0%} of its time"


def _medians_without_one(values: Iterable[float]) -> tuple[float, float]:
    """Return two lower medians of all values but one; both are 0 for fewer than two values.

    If the value left out is greater than the first median, the rest have the first median.
    Otherwise they have the second.
    """
    ordered = sorted(values)
    if len(ordered) < 2:
        return 0.0, 0.0
    middle = len(ordered) // 2 - 1
    return ordered[middle], ordered[middle + 1]
