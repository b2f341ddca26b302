"""Work that the launcher does while mpirun starts, and work that it leaves out at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launcher.jobs import a_job
from support.wrapper import START

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
