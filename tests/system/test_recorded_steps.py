"""Every step of real jobs is in the folder of the run, whatever becomes of programs and disk."""

from __future__ import annotations

import json
import resource

import pytest
from support.processes import wait_until

from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import RunFiles

pytestmark = pytest.mark.mpi


def run_in(folder):
    return read_run(RunFiles((folder / "out" / "latest").resolve()))


def steps_of(attempt, instance):
    return [each for each in attempt.steps if each.instance == instance]


# Instance 1 is killed in its first run, and nobody asks it about its last steps.
KILLED = """
import os, signal, time
import popdist_py
from popdist_py import heartbeat

popdist_py.init()
index, first = popdist_py.getInstanceIndex(), os.environ["POPDIST_RESTART_COUNT"] == "0"
for number in range(1, 1201 if first else 101):
    time.sleep(0.001)
    heartbeat.step(2, number / 4)
if first and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while first:
    time.sleep(1)
"""


@pytest.mark.sweep
def test_steps_of_a_millisecond_are_all_there_also_of_a_killed_program_and_after_a_restart(
    poprun, script, tmp_path
):
    done = poprun("-n", 2, "--max-restarts", 1, "--output-dir", "out", script(KILLED))
    assert done.returncode == 0, done.stderr
    run = run_in(tmp_path)
    first, second = run.attempts
    assert (first.report["cause"], second.report["cause"]) == ("failed", "completed")
    assert [each.step for each in steps_of(first, 1)] == list(range(1, 1201))
    others = [each.step for each in steps_of(first, 0)]
    assert others == list(range(1, len(others) + 1))
    for instance in (0, 1):
        assert [each.step for each in steps_of(second, instance)] == list(range(1, 101))
    for attempt in (first, second):
        assert all(each.loss == each.step / 4 and each.samples == 2 for each in attempt.steps)
        assert attempt.observations[-1][1].instances[1].step == steps_of(attempt, 1)[-1].step
    assert "too quick" not in done.stderr


STOPS = """
import time
from pathlib import Path
import popdist_py
from popdist_py import heartbeat

popdist_py.init()
while not Path("stop").exists():
    time.sleep(0.001)
    heartbeat.step()
print("done")
"""


@pytest.mark.sweep
def test_a_disk_that_is_full_is_said_once_and_the_job_goes_on(poprun, script, tmp_path):
    """A limit on the launcher's files stands for the disk."""
    job = poprun("-n", 1, "--output-dir", "out", script(STOPS), start=True)
    steps = tmp_path / "out" / "latest" / "attempt-1" / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size > 1000)
    limit = steps.stat().st_size + 30_000
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (limit, limit))
    said = job.stderr.readline()
    (tmp_path / "stop").touch()
    stdout, rest = job.communicate(timeout=60)
    assert said.startswith(
        "poprun-py: the job continues, but its steps are no longer recorded (out/"
    ), said
    assert said.endswith("/attempt-1/steps.jsonl: File too large)\n")
    assert (job.returncode, stdout) == (0, "[1,0]<stdout>:done\n")
    # Plotly alone is larger than the limit.
    assert rest.startswith("poprun-py: warning: the page of the run cannot be written (")
    assert "File too large); to write the page, run poprun-py report out/" in rest
    (attempt,) = run_in(tmp_path).attempts
    kept = [each.step for each in attempt.steps]
    assert kept == list(range(1, len(kept) + 1))
    assert json.loads((steps.parent.parent / "report.json").read_text())["exit_code"] == 0
