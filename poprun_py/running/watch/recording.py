"""From what wrappers tell to what is recorded: step records, on one clock, for all who take them.

Nothing here asks an instance, or decides when one is asked: job_observer.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from popdist_py.errors import counted
from poprun_py.errors import explain_os_error
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import Recorder, StepRecord


class InstanceSteps:
    """The steps of one instance, as its wrapper tells of them.

    The clock of its host is compared with the launcher's whenever an answer comes: the host read
    its own at some time between question and answer. What was known before is kept as long as that
    allows it: an answer that comes late moves no step.

    Attributes:
        lost: how many steps were made too quickly to be told of.
    """

    def __init__(self, index: int) -> None:
        self.lost = 0
        self._index = index
        self._ahead: float | None = None  # of the launcher's clock, in seconds
        self._last_at = 0.0

    def take(self, message: Mapping[str, Any], asked: float, came: float) -> list[StepRecord]:
        """Return the steps that a message tells of, in order.

        Args:
            message: of the wrapper, with its ``ledger`` and the new ``steps``.
            asked: when it was asked; -inf if it was not. Both in seconds since the epoch.
            came: when the message came.
        """
        ledger, steps = message.get("ledger"), message.get("steps")
        if ledger is None or steps is None:
            return []
        self.lost += steps["lost"]
        ahead = self._compare_clocks(ledger["now"] / 1e9, asked, came)
        return [self._record(row, ahead) for row in steps["rows"]]

    def _compare_clocks(self, theirs: float, asked: float, came: float) -> float:
        """Return how far the launcher's clock is ahead of the host's."""
        least, most = asked - theirs, came - theirs
        self._ahead = most if self._ahead is None else min(max(self._ahead, least), most)
        return self._ahead

    def _record(self, row: Sequence[Any], ahead: float) -> StepRecord:
        number, ended, taken, own, samples, loss = row
        self._last_at = max(self._last_at, ended / 1e9 + ahead)
        return StepRecord(
            at=self._last_at,
            instance=self._index,
            step=number,
            seconds=max(0, taken) / 1e9,
            own_seconds=max(0, own) / 1e9,
            samples=samples,
            loss=loss,
        )


class Recorders:
    """Hands everything to all recorders of a job; one that fails gets nothing more.

    Args:
        recorders: who takes it.
        warn: takes a sentence for the user.
    """

    def __init__(self, recorders: Sequence[Recorder], warn: Callable[[str], None]) -> None:
        self._recorders = list(recorders)
        self._warn = warn

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Hand on steps of one instance."""
        if records:
            self._each(lambda recorder: recorder.steps(records))

    def look(self, view: JobView, at: float) -> None:
        """Hand on a look at all instances."""
        self._each(lambda recorder: recorder.look(view, at))

    def end(self, view: JobView, at: float, lost: Mapping[int, int]) -> None:
        """Hand on the last look, and say how many steps are missing, if any are."""
        self.look(view, at)
        missing = [index for index, number in lost.items() if number]
        if missing:
            one = f"instance {missing[0]}"
            whose = one if len(missing) == 1 else f"{len(missing)} instances"
            total = sum(lost.values())
            were = "was" if total == 1 else "were"
            self._warn(f"{counted(total, 'step')} of {whose} {were} too quick to be recorded")

    def _each(self, hand_on: Callable[[Recorder], None]) -> None:
        for recorder in tuple(self._recorders):
            try:
                hand_on(recorder)
            # The job goes on, whatever a service or a disk does.
            except Exception as error:
                self._recorders.remove(recorder)
                self._warn(_sentence(recorder, error))


def _sentence(recorder: Recorder, error: Exception) -> str:
    """Return what the user is told of a recorder that failed."""
    problem = "the job goes on, but its steps are no longer recorded"
    if isinstance(error, OSError):
        return explain_os_error(error, problem)
    return f"{problem} ({type(recorder).__name__}: {error!r})"
