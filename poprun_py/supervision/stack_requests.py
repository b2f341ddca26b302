"""Collecting the Python stacks of all instances: ask all, wait a little, hand on what came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from poprun_py.instance import protocol
from poprun_py.supervision.control_channel import Control

__all__ = ["Dumps"]

# Instances answer within milliseconds; one that does not is overwhelmed, or its host is.
_ANSWER_SECONDS = 3.0

Done = Callable[[dict[int, Any]], None]


@dataclass(slots=True)
class _Dump:
    """One collection: who has yet to answer, and what to do with the answers."""

    waiting: set[int]
    deadline: float
    done: Done
    answers: dict[int, Any] = field(default_factory=dict)


class Dumps:
    """The collections of one run that are under way."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._open: list[_Dump] = []

    def start(self, done: Done) -> None:
        """Ask all instances; ``done`` gets the answers, None for an instance that gave none."""
        peers = self._control.peers
        waiting = {p.index for p in peers.values() if p.outcome is None and p.started}
        dump = _Dump(waiting=waiting, deadline=time.monotonic() + _ANSWER_SECONDS, done=done)
        self._open.append(dump)
        for index in sorted(waiting):
            self._control.send(peers[index], protocol.DUMP, None)
        self._finish(lambda d: not d.waiting)

    def take(self, index: int, found: Any) -> None:
        """Take an instance's answer; None if it will give none."""
        for dump in self._open:
            if index in dump.waiting:
                dump.waiting.discard(index)
                dump.answers[index] = found
        self._finish(lambda dump: not dump.waiting)

    def look(self, now: float) -> None:
        """End the collections whose time is over."""
        self._finish(lambda dump: now >= dump.deadline)

    def wait_limit(self, now: float) -> float:
        """Return the seconds until the next collection's time is over."""
        return min((max(0.0, dump.deadline - now) for dump in self._open), default=float("inf"))

    def _finish(self, is_over: Callable[[_Dump], bool]) -> None:
        over = [dump for dump in self._open if is_over(dump)]
        self._open = [dump for dump in self._open if dump not in over]
        for dump in over:
            dump.done({**dump.answers, **dict.fromkeys(dump.waiting)})
