"""The HTML of a JobHandle, and a notebook cell that shows the job until it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from poprun_py.display.page import Part, Sentence, fragment
from poprun_py.python_api.result_views import result_parts
from poprun_py.python_api.status import JobStatus
from poprun_py.python_api.value_views import status_parts
from poprun_py.running.supervise.job import LaunchResult

_UPDATE_SECONDS = 0.5

Outcome = futures.Future[LaunchResult]


def job_html(name: str, status: JobStatus, outcome: Outcome) -> str:
    """Return HTML that shows a running job's instances, or an ended job's result or error."""
    if status.exit_code is None:
        kind = "warn" if status.state != "running" else ""
        return fragment(f"{name}: {status}", status_parts(status), kind=kind)
    error = outcome.exception()
    result = outcome.result() if error is None else getattr(error, "result", None)
    parts: list[Part] = [Sentence(str(error))]
    if isinstance(result, LaunchResult):
        parts = result_parts(result)
    is_good = status.exit_code == 0
    return fragment(f"{name}: {status}", parts, kind="good" if is_good else "bad")


def show_cell(name: str, get_status: Callable[[], JobStatus], outcome: Outcome) -> None:
    """Show a job in a notebook cell, and update the cell until the job has ended."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    def content() -> dict[str, str]:
        status = get_status()
        return {
            "text/plain": f"<JobHandle {name}: {status}>",
            "text/html": job_html(name, status, outcome),
        }

    def update_to_end() -> None:
        while not outcome.done():
            futures.wait([outcome], _UPDATE_SECONDS)
            cell.update(content(), raw=True)

    show: Any = display  # IPython has no type annotations
    cell = show(content(), raw=True, display_id=True)
    # In a terminal, each update of the cell would print another line.
    is_notebook = cell is not None and hasattr(get_ipython(), "kernel")
    if is_notebook and not outcome.done():
        threading.Thread(target=update_to_end, name=f"poprun_py cell {name}", daemon=True).start()
