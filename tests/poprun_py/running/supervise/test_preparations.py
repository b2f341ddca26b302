"""Work that the launcher does while mpirun starts, and work that it leaves out at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launcher.jobs import a_job
from support.wrapper import START

from poprun_py.errors import StartError
from poprun_py.running.supervise import outcome
from poprun_py.running.supervise.running_job import RunningJob
from poprun_py.running.supervise.supervisor import supervise

# A wrapper without mpirun, which is enough for one instance.
COMMAND = (sys.executable, "-I", "-S", str(START), "--", "true")
SUPERVISES = """
import os, sys
from support.launcher.jobs import a_job
from poprun_py import process_info
from poprun_py.running.supervise.supervisor import supervise

read = []
process_info.all_stats = lambda: read.append(1) or iter(())
job = a_job(tuple(sys.argv[1:]), environ=dict(os.environ))
print(supervise(job, log=lambda _: None).exit_code, read)
"""


@pytest.mark.timeout(60)
def test_preparations_are_made_once_before_the_program_starts():
    calls = []
    result = supervise(
        a_job(COMMAND, environ=dict(os.environ)),
        log=lambda _: None,
        while_starting=lambda: calls.append("while starting"),
        on_started=lambda _: calls.append("started"),
    )
    assert result.exit_code == 0
    assert calls == ["while starting", "started"]


@pytest.mark.timeout(60)
def test_a_process_that_is_refused_while_the_launcher_prepares_the_job_is_reported(
    tmp_path, monkeypatch
):
    refused, begin = tmp_path / "refused", RunningJob.begin

    def begin_late(*arguments):
        while not refused.exists():
            time.sleep(0.01)
        begin(*arguments)

    monkeypatch.setattr(RunningJob, "begin", begin_late)
    monkeypatch.setattr(outcome, "process_refusals_and_limit", lambda: (int(refused.exists()), 4))
    mpirun = ("sh", "-c", f"touch {refused}; exit 1")
    with pytest.raises(StartError, match="the limit of 4 processes and threads was reached"):
        supervise(a_job(mpirun, environ=dict(os.environ)), log=lambda _: None)


@pytest.mark.timeout(60)
@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="this kernel does not list the children of a process",
)
def test_the_end_of_a_job_reads_no_other_processes_of_the_machine():
    """On a login node with thousands of processes, that would take longer than the job's start."""
    # This process may have other children, so another process supervises the job.
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISES, *COMMAND],
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "0 []\n", done.stderr
