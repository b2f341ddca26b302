"""Small folders of runs in every state, for tests of the list of runs."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from poprun_py.display.formatting import iso_time

NOT_A_PROCESS = 2**22 + 1


def observed(**state):
    """Return an observation with one instance."""
    usual = {"step": 10, "num_timed_steps": 9, "step_seconds": {"median": 0.25}, "loss": 0.5}
    return {"instances": [{**usual, **state}]}


def write_run(parent, name, *, ended=None, cause="completed", code=0, began=None, **report):
    """Write the folder of a run that ended some seconds ago, or has not ended; return its path."""
    now = time.time()
    began = now - 100.0 if began is None else began
    ended_at = None if ended is None else iso_time(now - ended)
    attempt = {
        "number": 1, "folder": "attempt-1", "began_at": iso_time(began), "ended_at": ended_at,
        "cause": None if ended is None else cause, "observation": observed(),
    }  # fmt: skip
    document = {
        "version": 2, "run_id": name, "state": "running" if ended is None else "ended",
        "launcher": {"host": os.uname().nodename, "pid": NOT_A_PROCESS},
        "began_at": iso_time(began), "ended_at": ended_at,
        "exit_code": None if ended is None else code, "program": ["python3", "train.py"],
        "plan": {"num_instances": 1}, "attempts": [attempt], **report,
    }  # fmt: skip
    folder = Path(parent, name)
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "attempt-1" / "instance-0.stdout").write_text("x" * 5000)
    (folder / "report.json").write_text(json.dumps(document))
    return folder


def locked(folder):
    """Lock the folder of a run as its launcher does, and return the lock's descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
