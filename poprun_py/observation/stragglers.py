"""Which instance is slower than the others, and the likely reason.

Pure. Instances that train in step all take as long as the slowest one: what tells them apart is the
time of a step in which they do not wait for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

from poprun_py.observation.instance_state import InstanceState, median

__all__ = ["Straggler", "slowest", "stands_out", "stragglers"]

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
    """Return the instances that are slower than the median by more than 20 % for ten steps.

    The slowest comes first. The median is the lower one: of two instances, the faster.
    """
    training = _comparable(states)
    usual = median([state.own_seconds for state in training])
    found = [_straggler(state, training, usual) for state in training]
    slow = [each for each in found if each.is_slow]
    return sorted(slow, key=lambda each: -each.own_seconds)


def stands_out(own: float, usual: float) -> bool:
    """Return whether a step takes so much longer than the median one that others wait for it.

    Args:
        own: seconds of a step without waiting for others.
        usual: those of the median instance.
    """
    return own - usual > max((_FACTOR - 1) * usual, _NOTICED_SECONDS)


def slowest(states: Sequence[InstanceState]) -> Straggler | None:
    """Return the instance whose steps take longest without waiting; None of fewer than two."""
    training = _comparable(states)
    if len(training) < 2:
        return None
    usual = median([state.own_seconds for state in training])
    worst = max(training, key=lambda state: state.own_seconds)
    return _straggler(worst, training, usual)


def _comparable(states: Sequence[InstanceState]) -> list[InstanceState]:
    """Return the instances that have made enough steps."""
    return [state for state in states if state.num_steps >= _STEPS and state.own_seconds > 0]


def _straggler(
    state: InstanceState, all_states: Sequence[InstanceState], usual: float
) -> Straggler:
    others = [each for each in all_states if each.index != state.index]
    excess = _longer(state, others, lambda each: 1.0 - each.share(*_NO_WORK))
    cause, detail = _reason(state, others, excess) if excess > 0 else ("", "")
    return Straggler(
        instance=state.index,
        host=state.host,
        own_seconds=state.own_seconds,
        median_seconds=usual,
        # Ten steps alone may fall on a bad moment of a busy host.
        is_slow=stands_out(min(state.own_seconds, usual + excess), usual),
        cause=cause,
        detail=detail,
    )


def _longer(
    state: InstanceState,
    others: Sequence[InstanceState],
    share_of: Callable[[InstanceState], float],
) -> float:
    """Return how much longer a part of a step is than that of the median one of the others."""
    usual = median([share_of(other) * other.step_seconds for other in others])
    return share_of(state) * state.step_seconds - usual


def _reason(
    state: InstanceState, others: Sequence[InstanceState], excess: float
) -> tuple[str, str]:
    """Return why an instance takes longer by ``excess``, and the numbers that show it.

    What the host takes from it comes first: it makes any activity longer.
    """
    longer = partial(_longer, state, others)
    if state.swap_bytes > max((other.swap_bytes for other in others), default=0):
        return "it swaps", f"{state.swap_bytes / 2**20:.0f} MiB of it are on the disk"
    if longer(lambda each: each.throttled) > _EXPLAINS * excess:
        detail = f"its control group had used up its CPU time {state.throttled:.0%} of the time"
        return "its host throttles it", detail
    if longer(lambda each: each.queued) > _EXPLAINS * excess:
        return "it shares its CPUs", f"it waited for one {state.queued:.0%} of the time"
    by_name = {name: longer(methodcaller("share", name)) for name in _CAUSES}
    worst = max(by_name, key=lambda name: by_name[name])
    return _CAUSES[worst], f"{state.share(worst):.0%} of its time"
