"""A handle for people: one line, and in a notebook a cell that follows the job until it ends.

Nothing here changes a job. IPython is imported only where IPython itself asks for the cell.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from poprun_py.errors import StartError

if TYPE_CHECKING:
    from poprun_py.python_api.listener import Listener
    from poprun_py.python_api.status import JobStatus
    from poprun_py.running.supervise.job import LaunchResult

# Two looks a second: what a reader can follow, and what a job does not notice.
_SECONDS = 0.5


class ShownJob:
    """What a handle looks like; a base of JobHandle."""

    name: str
    _listener: Listener

    def status(self) -> JobStatus:
        """Return how far the job is."""
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            return f"<JobHandle {self.name}: {self.status()}>"
        except StartError:  # in a forked process; a repr is asked for in logs and debuggers
            return f"<JobHandle {self.name}: of another process>"

    def _repr_html_(self) -> str:
        return _html(self.name, self.status(), self._listener.outcome)

    def _ipython_display_(self) -> None:
        """Show the job in a cell, and keep it up to date there until the job has ended."""
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        show: Any = display  # it has no types
        cell = show(self._shown(), raw=True, display_id=True)
        # A terminal would print every look anew.
        if (
            cell is not None
            and hasattr(get_ipython(), "kernel")
            and not self._listener.ended.is_set()
        ):
            threading.Thread(
                target=self._follow, args=(cell,), name=f"poprun_py cell {self.name}", daemon=True
            ).start()

    def _follow(self, cell: Any) -> None:
        while not self._listener.ended.wait(_SECONDS):
            cell.update(self._shown(), raw=True)
        cell.update(self._shown(), raw=True)

    def _shown(self) -> dict[str, str]:
        """Return the job as text and as HTML."""
        status = self.status()
        return {
            "text/plain": f"<JobHandle {self.name}: {status}>",
            "text/html": _html(self.name, status, self._listener.outcome),
        }


def _html(name: str, status: JobStatus, outcome: LaunchResult | BaseException | None) -> str:
    from poprun_py.python_api.views import results
    from poprun_py.python_api.views.frame import framed, heading, note
    from poprun_py.running.supervise.job import LaunchResult

    ended = outcome if isinstance(outcome, LaunchResult) else getattr(outcome, "result", None)
    if status.exit_code is None:
        kind = "warn" if status.state != "running" else ""
        return framed(heading(f"{name}: {status}", kind), *status.parts())
    title = heading(f"{name}: {status}", "good" if status.exit_code == 0 else "bad")
    if isinstance(ended, LaunchResult):
        return framed(title, *results.result_parts(ended))
    return framed(title, note(str(outcome)))
