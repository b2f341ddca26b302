"""Real jobs side by side: what they run on is what the kernel shows, and nobody overtakes."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from support.processes import wait_until
from support.terminals import LAUNCHER, Typist

import poprun_py
from poprun_py.display.formatting import ranges_text
from poprun_py.errors import StartError

CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(len(CPUS) < 2, reason="jobs side by side need two CPUs"),
]
SHOW = """
import os, sys, time
from pathlib import Path
name = sys.argv[1]
Path(name).write_text(",".join(map(str, sorted(os.sched_getaffinity(0)))))
while not Path(name + ".end").exists():
    time.sleep(0.01)
"""
ONE = ("-n", 1, "--cores-per-instance", 1)
# All but the first core for one job, so that two fill any machine.
REST = ("-n", 1, "--cores-per-instance", max(1, len(CPUS) - 1))


@pytest.fixture
def jobs(poprun, tmp_path, monkeypatch, script):
    """Start jobs that say on which CPUs they run, until they are told to end."""
    monkeypatch.setenv("POPRUN_LEASES", str(tmp_path / "leases"))
    program = script(SHOW)
    shown = {}

    class Jobs:
        folder = tmp_path
        run = staticmethod(poprun)
        tickets = staticmethod(lambda: list((tmp_path / "leases").glob("ticket-*")))

        @staticmethod
        def start(name, *words):
            shown[name] = poprun(*words, sys.executable, program, name, start=True)
            return shown[name]

        @staticmethod
        def cpus(name):
            file = tmp_path / name
            wait_until(
                lambda: (file.exists() and file.read_text()) or shown[name].poll() is not None
            )
            assert file.exists(), shown[name].stderr.read()
            return set(map(int, file.read_text().split(",")))

        @staticmethod
        def end(name):
            (tmp_path / f"{name}.end").touch()
            return shown[name].communicate(timeout=60)

        @staticmethod
        def leases():
            done = poprun("--print-leases=json")
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        @staticmethod
        def report():
            return json.loads((tmp_path / "out" / "latest" / "report.json").read_text())

    yield Jobs
    for name, process in shown.items():
        (tmp_path / f"{name}.end").touch()
        process.communicate(timeout=60)


@pytest.mark.skipif(len(CPUS) > 4, reason="two jobs do not fill this machine")
def test_two_jobs_have_disjoint_cores_and_a_third_waits_for_one(jobs):
    first = jobs.start("first", *ONE)
    jobs.cpus("first")
    jobs.start("second", *REST)
    assert jobs.cpus("first").isdisjoint(jobs.cpus("second"))
    told = jobs.leases()["jobs"]
    assert [set(job["cpus"]) for job in told] == [jobs.cpus("first"), jobs.cpus("second")]
    assert [job["program"] for job in told] == ["program.py"] * 2
    assert told[0]["pid"] == first.pid
    assert all(job["run_id"] for job in told)
    # Nothing is left: a job that asks for a core is refused, with the ways out first.
    refused = jobs.run(*ONE, "touch", "started")
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    assert len(refused.stderr) <= 161
    way = (
        "poprun-py: error: this job got no CPUs; add --share-cores yes or "
        "--wait-for-resources: run "
    )
    assert refused.stderr.startswith(way)
    assert f"(pid {first.pid}) holds CPU {CPUS[0]}\n" in refused.stderr
    assert not (jobs.folder / "started").exists()
    # One waits, and nobody overtakes it.
    third = jobs.start("third", *ONE, "--wait-for-resources", "--output-dir", "out")
    wait_until(lambda: jobs.tickets())
    assert "waiting for CPUs (place 1 of 1 in the queue)" in third.stderr.readline()
    assert [w["pid"] for w in jobs.leases()["waiting"]] == [third.pid]
    before = jobs.cpus("first")
    jobs.end("first")
    assert jobs.cpus("third") == before
    assert jobs.tickets() == []
    (attempt,) = jobs.report()["attempts"]
    assert attempt["queue_seconds"] > 0
    assert "shares_cores" not in attempt


def test_a_job_runs_beside_another_one_with_a_warning_and_a_fair_part_of_the_threads(
    jobs, monkeypatch
):
    first = jobs.start("first")
    assert jobs.cpus("first") == set(CPUS)
    (run,) = (job["run_id"] for job in jobs.leases()["jobs"])
    done = jobs.run("--output", "plain", "printenv", "OMP_NUM_THREADS")
    assert (done.returncode, done.stdout) == (0, f"{max(1, len(CPUS) // 2)}\n")
    assert done.stderr == (
        f"poprun-py: warning: this job shares CPUs {ranges_text(CPUS)} with run {run} (pid "
        f"{first.pid}); to avoid sharing, give --share-cores no or --wait-for-resources\n"
    )
    # The variable is read by the command and by Python, where an option takes precedence.
    environ = {"POPRUN_SHARE_CORES": "no"}
    refused = jobs.run("true", env=environ)
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    assert refused.stderr.startswith(
        "poprun-py: error: this job got no CPUs; add --share-cores yes "
    )
    monkeypatch.setenv("POPRUN_SHARE_CORES", "no")
    with pytest.raises(StartError, match=f"pid {first.pid}. holds CPUs"):
        poprun_py.launch(["true"])
    shared = {"share_cores": True, "output_dir": str(jobs.folder / "out")}
    assert poprun_py.launch(["true"], **shared, warn=str).exit_code == 0
    (attempt,) = jobs.report()["attempts"]
    assert attempt["shares_cores"]
    assert "queue_seconds" not in attempt


@pytest.mark.sweep
@pytest.mark.parametrize(
    "words",
    [
        ("-n", len(CPUS) + 1, "--oversubscribe"),
        ("-n", 2, "--process-placement", "disabled"),
        ("-n", 2, "--numa-aware", "no"),
    ],
)
def test_an_oversubscribed_or_unplaced_job_never_blocks_another_one(jobs, words):
    jobs.start("first", *words)
    jobs.cpus("first")
    assert [job["shareable"] for job in jobs.leases()["jobs"]] == [True]
    for options in (ONE, ("--wait-for-resources",)):
        done = jobs.run(*options, "true")
        assert done.returncode == 0, done.stderr
        assert "warning: this job shares CPU" in done.stderr
        assert done.stderr.count("\n") == 1
    assert jobs.run("--share-cores", "no", "true").returncode == 3


@pytest.mark.sweep
def test_a_job_without_placement_needs_no_free_core(jobs):
    jobs.start("first")
    jobs.cpus("first")
    for words in ((), ("--cores-per-instance", 1)):
        done = jobs.run("-n", 2, "--process-placement", "disabled", *words, "true")
        assert done.returncode == 0, done.stderr


@pytest.mark.sweep
def test_an_unbound_job_is_bound_to_what_is_left(jobs):
    jobs.start("first", *ONE)
    taken = jobs.cpus("first")
    second = jobs.start("second")
    assert jobs.cpus("second") == set(CPUS) - taken
    assert f"this job has CPU{'s' * (len(CPUS) > 2)} " in second.stderr.readline()


@pytest.mark.sweep
def test_waiters_start_in_order_of_arrival(jobs):
    jobs.start("first")
    jobs.cpus("first")
    for count, name in enumerate(("a", "b"), 1):
        jobs.start(name, "--wait-for-resources=1m")
        wait_until(lambda n=count: len(jobs.tickets()) == n)
    # Though it would fit at once when the first ends.
    assert jobs.run(*ONE, "true").returncode == 3
    jobs.end("first")
    jobs.cpus("a")
    assert not (jobs.folder / "b").exists()
    jobs.end("a")
    assert jobs.cpus("b") == set(CPUS)


@pytest.mark.sweep
def test_a_killed_launcher_frees_its_cores(jobs):
    first = jobs.start("first", *ONE)
    jobs.cpus("first")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert jobs.leases() == {"jobs": [], "waiting": []}
    assert jobs.run("-n", len(CPUS), "true").returncode == 0


@pytest.mark.sweep
def test_what_is_only_looked_at_takes_and_sees_no_lease(jobs):
    words = ("-n", 2, "--cores-per-instance", 1)
    alone = jobs.run(*words, "--print-topology", "json").stdout
    assert not (jobs.folder / "leases").exists()
    jobs.start("first")
    jobs.cpus("first")
    assert jobs.run(*words, "--print-topology", "json").stdout == alone
    assert jobs.run(*words, "--dry-run", "true").returncode == 0
    assert jobs.run(*words, "--export-plan", "plan.json", "true").returncode == 0
    # A saved plan takes just the CPUs that it names.
    refused = jobs.run("--from-plan", "plan.json")
    assert refused.returncode == 3
    assert f"holds CPUs {ranges_text(CPUS)}" in refused.stderr
    jobs.start("second", *ONE, "--wait-for-resources=5m")
    wait_until(lambda: jobs.tickets())
    jobs.end("first")
    jobs.cpus("second")
    refused = jobs.run("--from-plan", "plan.json")
    assert refused.returncode == 3
    done = jobs.run("--from-plan", "plan.json", "--share-cores", "yes")
    assert done.returncode == 0, done.stderr
    jobs.end("second")
    assert jobs.run("--from-plan", "plan.json").returncode == 0


@pytest.mark.sweep
def test_the_lease_stays_over_restarts_and_ends_with_the_job(jobs):
    kept = "import json, os, sys; from pathlib import Path; "
    look = f"[f.name for f in Path({str(jobs.folder / 'leases')!r}).glob('lease-*')]"
    code = (
        f"{kept} print(*{look}, flush=True); sys.exit(not int(os.environ['POPDIST_RESTART_COUNT']))"
    )
    done = jobs.run("--max-restarts", 1, "--output", "plain", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert len(names) == 2
    assert len(set(names)) == 1
    assert jobs.leases()["jobs"] == []
    for words in (("true",), ("false",), ("/no/such/program",)):
        jobs.run(*words)
        assert list((jobs.folder / "leases").glob("lease-*")) == []


def test_a_launcher_in_an_instance_uses_the_cores_of_its_job(jobs):
    code = (
        "import subprocess, sys; "
        "sys.exit(subprocess.run([sys.executable, '-m', 'poprun_py', 'true']).returncode)"
    )
    done = jobs.run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "hold" not in done.stderr


def test_a_terminal_has_one_line_for_whom_is_waited_and_ctrl_c_ends_it(jobs):
    jobs.start("first")
    jobs.cpus("first")
    with Typist([*LAUNCHER, "--wait-for-resources", "true"], cwd=jobs.folder) as user:
        user.expect(r"waiting \d+ s for CPUs \(place 1 of 1 in the queue\): ")
        wait_until(jobs.tickets)
        user.type("\x03")
        assert user.ended() == 130
    assert jobs.tickets() == []
    # Each line took the place of the one before, and none was as wide as the terminal.
    lines = user.seen.replace("^C", "").replace("\r\r", "\r").split("\r\x1b[J")[1:]
    assert len(lines) > 1
    assert "\n" not in "".join(lines[:-1])
    assert max(map(len, lines[:-1])) < 80
