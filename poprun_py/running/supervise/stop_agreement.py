"""How all instances come to stop at the same question, and how long that may take.

Each instance counts its calls of ``stopRequested()``. A proposal names a call that no instance has
reached yet; an instance that reaches it waits there. When every instance has confirmed that it is
still before the call, the proposal is agreed; if one was faster, a later call is proposed. Pure: no
channel, the clock is an argument, and what to do next is returned.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Iterable

_FIRST_MARGIN, _GROWTH = 2, 4
# Wrappers answer at once, on a loaded host within a second; one that does not is stopped.
_ANSWER_SECONDS = 3.0


class Move(enum.Enum):
    """What to do next."""

    PROPOSE = "send the proposal to every member"
    AGREE = "the proposal holds: tell every member"
    SIGNAL = "no member asks, or there is no time left: deliver the signal itself"


class StopAgreement:
    """One request to stop; starts with proposal 0, which only asks for the counts."""

    def __init__(self, members: Iterable[int]) -> None:
        self.proposal = 0
        self.agreed = False
        self._members = set(members)
        self._waiting = set(self._members)
        self._polls: dict[int, int] = {}
        self._margin = _FIRST_MARGIN

    def answer(self, member: int, proposal: int, polls: int) -> Move | None:
        """Take a member's number of calls; returns what to do when all have answered."""
        if proposal != self.proposal or member not in self._waiting:
            return None
        self._waiting.discard(member)
        self._polls[member] = polls
        return self._next()

    def leave(self, member: int) -> Move | None:
        """A member has ended: the others go on without it."""
        if member not in self._members:
            return None
        self._members.discard(member)
        self._waiting.discard(member)
        self._polls.pop(member, None)
        return self._next()

    def _next(self) -> Move | None:
        if self._waiting or self.agreed:
            return None
        most = max(self._polls.values(), default=0)
        if not most:
            return Move.SIGNAL
        if self.proposal and most < self.proposal:
            self.agreed = True
            return Move.AGREE
        self.proposal = most + self._margin
        self._margin *= _GROWTH
        self._waiting = set(self._members)
        return Move.PROPOSE


class StopRequest:
    """A signal of the launcher on its way to the programs.

    Args:
        grace_seconds: How long programs have to reach a step and save after SIGTERM.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal = 0
        self._grace_seconds = grace_seconds
        self._agreement: StopAgreement | None = None
        self._deadline = float("inf")
        self._is_saving = False

    @property
    def proposal(self) -> int:
        """The call of ``stopRequested()`` that is proposed or agreed on."""
        return self._agreement.proposal if self._agreement is not None else 0

    def begin(self, number: int, members: Collection[int], now: float) -> Move | None:
        """Stop because of signal ``number``, which counts from now on.

        Args:
            number: SIGTERM limits the time to save; SIGUSR1 does not.
            members: The instances whose programs run; none if the job is not complete.
            now: The time.
        """
        if self._agreement is not None:
            if number == signal.SIGTERM:
                self.signal = number
                self._limit_saving(now)
            return None
        self.signal = number
        if not members:
            return Move.SIGNAL
        self._agreement = StopAgreement(members)
        self._is_saving = False
        self._deadline = now + _ANSWER_SECONDS
        return Move.PROPOSE

    def answer(self, index: int, proposal: int, polls: int, now: float) -> Move | None:
        """Take an instance's answer to a proposal."""
        if self._agreement is None:
            return None
        return self._after(self._agreement.answer(index, proposal, polls), now)

    def leave(self, index: int, now: float) -> Move | None:
        """An instance has ended."""
        return self._after(self._agreement.leave(index), now) if self._agreement else None

    def next_deadline(self) -> float:
        """Return when the signal is delivered although there was an agreement to be; inf: never."""
        return self._deadline

    def on_time(self, now: float) -> Move | None:
        """Return ``Move.SIGNAL`` when the time to answer, or to save, is over."""
        if now < self._deadline:
            return None
        if not self._is_saving:
            self._agreement = None
        self._deadline = float("inf")
        return Move.SIGNAL

    def _after(self, move: Move | None, now: float) -> Move | None:
        if move is Move.SIGNAL:
            self._agreement = None
            self._deadline = float("inf")
        elif move is Move.PROPOSE:
            self._limit_saving(now)
        return move

    def _limit_saving(self, now: float) -> None:
        """Programs do ask: after SIGTERM they have the grace time, else all the time they need."""
        if not self._is_saving:
            self._is_saving = True
            self._deadline = float("inf")
        if self.signal == signal.SIGTERM:
            self._deadline = min(self._deadline, now + self._grace_seconds)
