"""Asking the programs to stop: the talk that leads to an agreement, or to the plain signal.

What is agreed on is ``agreement``'s matter; here are the messages, and the time there is for them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from poprun_py.instance import protocol
from poprun_py.supervision.alarms import Alarms
from poprun_py.supervision.control_channel import Control
from poprun_py.supervision.stop_agreement import Move, StopAgreement

__all__ = ["StopRequest"]

# Wrappers answer at once, on a loaded host within a second; one that does not is stopped.
_ANSWER_SECONDS = 3.0


class StopRequest:
    """A signal of the launcher on its way to the programs.

    Args:
        control: the connections to the instances.
        alarms: the supervisor's alarms.
        grace_seconds: how long programs have to reach a step and save after SIGTERM.
        pass_on: delivers a signal to programs that do not ask whether to stop.
        log: takes a line of the launcher's own log.
    """

    def __init__(
        self,
        control: Control,
        alarms: Alarms,
        grace_seconds: float,
        pass_on: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self._control = control
        self._alarms = alarms
        self._grace_seconds = grace_seconds
        self._pass_on = pass_on
        self._log = log
        self._agreement: StopAgreement | None = None
        self._signal = 0

    def begin(self, number: int) -> None:
        """Agree with the instances on where to stop because of signal ``number``."""
        if self._agreement is not None:
            if number == signal.SIGTERM:
                self._signal = number
                self._limit()
            return
        members = [p.index for p in self._control.peers.values() if p.died is None]
        if not self._control.is_complete or not members:
            self._pass_on(number)
            return
        self._agreement = StopAgreement(members)
        self._signal = number
        self._alarms.set("agreement", _ANSWER_SECONDS, lambda: self._advance(Move.NOBODY))
        self._control.broadcast(protocol.PROPOSE, self._agreement.proposal)

    def answer(self, index: int, proposal: int, polls: int) -> None:
        """Take an instance's answer to a proposal."""
        if self._agreement is not None:
            self._advance(self._agreement.answer(index, proposal, polls))

    def leave(self, index: int) -> None:
        """An instance has ended."""
        if self._agreement is not None:
            self._advance(self._agreement.leave(index))

    def _advance(self, move: Move | None) -> None:
        if self._agreement is None or move is None:
            return
        if move is Move.NOBODY:
            self._agreement = None
            self._alarms.clear("agreement")
            self._pass_on(self._signal)
        elif move is Move.PROPOSE:
            self._limit()
            self._control.broadcast(protocol.PROPOSE, self._agreement.proposal)
        else:
            self._log("all instances stop at their next question whether to stop")
            self._control.broadcast(protocol.AGREE, self._agreement.proposal)

    def _limit(self) -> None:
        """Programs do ask: after SIGTERM they have the grace time, else all the time they need."""
        self._alarms.clear("agreement")
        if self._signal == signal.SIGTERM:
            self._alarms.set("saving", self._grace_seconds, lambda: self._pass_on(signal.SIGTERM))
