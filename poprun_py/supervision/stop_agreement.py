"""How all instances come to stop at the same question: pure, no clock and no channel.

Each instance counts its calls of ``stopRequested()``. A proposal names a call that no instance has
reached yet; an instance that reaches it waits there. When every instance has confirmed that it is
still before the call, the proposal is agreed; if one was faster, a later call is proposed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["Move", "StopAgreement"]

_FIRST_MARGIN, _GROWTH = 2, 4


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
