"""The start of a job: until every instance is there, and each on the host that it is planned for.

A host that is lost while mpirun starts its daemons makes mpirun wait for ever: a job that is not
complete after a while is looked into. Nothing is stopped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poprun_py.errors import StartError
from poprun_py.instance.protocol import LOST_AFTER_SECONDS
from poprun_py.supervision.alarms import Alarms
from poprun_py.supervision.control_channel import Control

__all__ = ["Start"]


class Start:
    """What may keep a job from starting.

    Args:
        hosts: the name that each instance's host gives itself; empty where that is not known.
        control: the connections to the instances.
        alarms: the supervisor's alarms.
        explain: raises StartError with what is wrong, if something is; None if nobody knows.
        refuse: ends the job, told why.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        control: Control,
        alarms: Alarms,
        explain: Callable[[], None] | None,
        refuse: Callable[[str], None],
    ) -> None:
        self._hosts = hosts
        self._control = control
        self._alarms = alarms
        self._explain = explain
        self._refuse = refuse
        self._patience = float(LOST_AFTER_SECONDS)

    def look_later(self) -> None:
        """Look into a job that is not complete after a while, and again after twice the time."""
        if self._explain is not None:
            self._alarms.set("start", self._patience, self._look)

    def is_as_planned(self) -> bool:
        """Tell whether every instance is on its host; refuse the job if not."""
        for index, wanted in enumerate(self._hosts):
            found = self._control.peers[index].host
            if wanted and found != wanted:
                self._refuse(
                    f"instance {index} is on host {found}, planned on {wanted}: leave the "
                    "placement to poprun-py (no --host or --map-by in --mpi-global-args); if the "
                    "host has another name now, launch without --no-check or plan again"
                )
                return False
        return True

    def _look(self) -> None:
        if self._control.is_complete or self._explain is None:
            return
        try:
            self._explain()
        except StartError as error:
            self._refuse(str(error))
        else:
            self._patience *= 2
            self.look_later()
