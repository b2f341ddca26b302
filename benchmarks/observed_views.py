"""What each view of a running job costs its steps: whole jobs with and without it, in turns.

A job of two instances with steps of some 10 ms (observed_job.py). Each round runs it twice without
any view, first and in the middle, and once with each. A view's ratio is that of the medians over
all rounds; how far the two jobs without a view are apart tells how much of it is chance. Nothing
here looks inside a program: observe.py does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["measured_views"]

_HERE = Path(__file__).resolve().parent
_LAUNCHER = (sys.executable, "-m", "poprun_py")
_PROGRAM = str(_HERE / "observed_job.py")
_SECONDS = 1.0  # between two looks of somebody outside


@dataclass(frozen=True)
class _View:
    """A way of looking: options of the launch, and what somebody outside does every second."""

    name: str
    limit: float
    options: tuple[str, ...] = ()
    outside: Callable[[int], None] | None = None


def _nothing(_: int) -> None:
    """Look at nothing."""


def _ask_status(pid: int) -> None:
    """Ask as another terminal would."""
    words = (*_LAUNCHER, f"--status={pid}", "--status-format", "json")
    subprocess.run(words, capture_output=True, check=False)


def _scraper(port: int) -> Callable[[int], None]:
    def scrape(_: int) -> None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()

    return scrape


def _views(folder: str) -> list[_View]:
    """Return every view; files go to ``folder``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    recorded = ("--output-dir", f"{folder}/runs")
    endpoint = ("--metrics-port", str(port))
    events = ("--metrics-to", f"tensorboard:{folder}/events")
    timeline = (f"--timeline={folder}/timeline.json.gz",)
    return [
        _View("--live", 1.01, ("--live",)),
        _View("--status, every second", 1.01, (), _ask_status),
        _View("--output-dir", 1.01, recorded),
        _View("--metrics-port, scraped every second", 1.01, endpoint, _scraper(port)),
        _View("--metrics-to tensorboard", 1.01, events),
        _View("--timeline", 1.03, timeline),
    ]


def measured_views(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each view: the step without it and with it, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        views = _views(folder)
        half = len(views) // 2
        first, again = _View("nobody looks", 1.0), _View("nobody looks, again", 1.0)
        turns = (first, *views[:half], again, *views[half:])
        _step(first, steps)  # warms up the files of all that is imported
        taken: dict[str, list[float]] = {view.name: [] for view in turns}
        for _ in range(rounds):
            for view in turns:
                taken[view.name].append(_step(view, steps))
        unseen = taken[first.name] + taken[again.name]
        for view in (again, *views):
            without = statistics.median(taken[first.name] if view is again else unseen)
            with_it = statistics.median(taken[view.name])
            yield {
                "what": view.name,
                "ms without": round(without / 1e3, 3),
                "ms with": round(with_it / 1e3, 3),
                "ratio": round(with_it / without, 4),
                "limit": view.limit,
                "rounds": rounds,
            }


def _step(view: _View, steps: int) -> float:
    """Return the median microseconds of a step of a job that is looked at so."""
    words = (*_LAUNCHER, "-n", "2", "--output", "plain", *view.options, _PROGRAM, str(steps))
    environ = {**os.environ, "PYTHONPATH": str(_HERE.parent)}
    ended = threading.Event()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as job:
        looker = threading.Thread(target=_look, args=(view.outside or _nothing, job.pid, ended))
        looker.start()
        try:
            output = job.communicate()[0]
        finally:
            ended.set()
            looker.join()
    if job.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with code {job.returncode}")
    return float(json.loads(output))


def _look(outside: Callable[[int], None], pid: int, ended: threading.Event) -> None:
    while not ended.wait(_SECONDS):
        outside(pid)
