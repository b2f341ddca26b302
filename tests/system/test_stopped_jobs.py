"""The commands ``jobs`` and ``stop`` with real jobs: with a lease, without one, and waiting."""

from __future__ import annotations

import json
import os

import pytest
from support.processes import wait_until

from poprun_py.command.cli import run

pytestmark = pytest.mark.mpi
SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(100)\n"
STAYS = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPS}"
ALL = ("-n", 1, "--cores-per-instance", len(os.sched_getaffinity(0)))


@pytest.fixture
def listed(capsys):
    """Return a function that returns this machine's jobs by the name of the run."""

    def call():
        capsys.readouterr()
        assert run(["jobs", "--format", "json"]) == 0
        return {job["run_id"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}

    return call


def named(name, **variables):
    return {"POPRUN_RUN_ID": name, **variables}


def test_jobs_are_listed_and_stopped_by_name(poprun, script, tmp_path, monkeypatch, capsys, listed):
    monkeypatch.setenv("POPRUN_LEASES", str(tmp_path / "leases"))
    program = script(SLEEPS)
    holds = poprun(*ALL, program, start=True, env=named("holds"))
    free = poprun(
        "-n", 2, "--oversubscribe", program, start=True, env=named("17", POPRUN_LEASES="none")
    )
    for job in (holds, free):
        assert "up" in job.stdout.readline()
    waits = poprun(*ALL, "--wait-for-resources", program, start=True, env=named("waits"))
    wait_until(lambda: "waits" in listed())
    jobs = listed()
    assert jobs["holds"]["pid"] == holds.pid
    assert jobs["holds"]["cpus"] == sorted(os.sched_getaffinity(0))
    assert (jobs["17"]["cpus"], jobs["17"]["num_instances"]) == ([], 2)
    assert (jobs["waits"]["state"], jobs["waits"]["pid"]) == ("waiting", waits.pid)
    # A wrong name beside a right one stops none.
    assert run(["stop", "holds", "wait"]) == 2
    said = capsys.readouterr().err
    assert (
        "wait: no job of this name runs on this host; did you mean waits?; your running jobs:"
    ) in said
    assert f"holds (launcher {holds.pid})" in said
    assert run(["stop", "waits", str(waits.pid)]) == 0
    assert capsys.readouterr().out.startswith(f"waits (launcher {waits.pid}) ended after ")
    assert waits.wait(20) == -15
    assert holds.poll() is free.poll() is None
    assert run(["stop", "17", "holds"]) == 0
    for line, name, job in zip(
        capsys.readouterr().out.splitlines(), ("17", "holds"), (free, holds), strict=True
    ):
        assert line.startswith(f"{name} (launcher {job.pid}) ended after ")
        assert line.endswith(" s with exit code 143: SIGTERM received")
        assert job.wait(0.5) == 143
    assert not {"holds", "17", "waits"} & set(listed())


def test_a_job_that_stays_is_named_after_the_time_and_killed_by_the_second_stop(
    poprun, script, capsys
):
    job = poprun("-n", 1, "--grace", 100, script(STAYS), start=True, env=named("stays"))
    assert "up" in job.stdout.readline()
    assert run(["stop", "--timeout", "0.5s", "stays"]) == 124
    out, err = capsys.readouterr()
    assert out == ""
    assert f"still running after --timeout 0.5 s: stays (launcher {job.pid})" in err
    assert run(["stop", "stays"]) == 0
    assert "ended after" in capsys.readouterr().out
    assert job.wait(0.5) == 143


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "stop needs the name of a run or the process id of a launcher; poprun-py jobs lists"),
        (["--timeout", "soon", "x"], "--timeout 'soon': expected a number of seconds above 0"),
        (["--kill"], "unknown option --kill"),
    ],
)
def test_wrong_words_of_stop_are_refused(look, words, said):
    done = look("stop", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
