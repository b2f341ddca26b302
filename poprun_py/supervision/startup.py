"""The start of a job: until every instance is there, and each on the host that it is planned for.

A host that is lost while mpirun starts its daemons makes mpirun wait for ever: a job that is not
complete after a while is looked into. This module stops nothing: it returns what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from poprun_py.errors import StartError
from poprun_py.instance.protocol import LOST_AFTER_SECONDS
from poprun_py.supervision.control_channel import Peer

__all__ = ["Startup"]


class Startup:
    """What may keep a job from starting; the clock is an argument.

    Args:
        hosts: the name that each instance's host gives itself; empty where that is not known.
        explain: raises StartError with the reason why the job does not start, if it finds one;
            None if there is no other host to ask.
    """

    def __init__(self, hosts: Sequence[str], explain: Callable[[], None] | None) -> None:
        self._hosts = hosts
        self._explain = explain
        self._patience_seconds = float(LOST_AFTER_SECONDS)
        self._look_at = float("inf")

    def begin(self, now: float) -> None:
        """Look into the job if it is not complete after a while, and again after twice the time."""
        if self._explain is not None:
            self._look_at = now + self._patience_seconds

    def end(self) -> None:
        """Look no more: every instance is there, or the job is stopped."""
        self._look_at = float("inf")

    def misplaced(self, peers: Mapping[int, Peer]) -> str | None:
        """Return what is wrong if an instance is on another host than planned."""
        for index, planned in enumerate(self._hosts):
            actual = peers[index].host
            if planned and actual != planned:
                return (
                    f"instance {index} is on host {actual}, planned on {planned}: leave the "
                    "placement to poprun-py (no --host or --map-by in --mpi-global-args); if the "
                    "host has another name now, launch without --no-check or plan again"
                )
        return None

    def next_deadline(self) -> float:
        """Return when the job is looked into; inf for never."""
        return self._look_at

    def on_time(self, now: float) -> str | None:
        """Ask what keeps the job, if it is time to; returns the answer if there is one."""
        if now < self._look_at or self._explain is None:
            return None
        try:
            self._explain()
        except StartError as error:
            self.end()
            return str(error)
        self._patience_seconds *= 2
        self.begin(now)
        return None
