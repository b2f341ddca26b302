"""Restarts of a job, and their pauses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.plans import plan_with_folder
from support.processes import wait_until

from poprun_py.errors import StartError
from poprun_py.launching import attempts
from poprun_py.launching.restart_pauses import backoff_seconds, pause
from poprun_py.launching.run_record import RunRecord
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult, Progress


@pytest.fixture
def job(monkeypatch):
    """Give a function that runs a job whose first attempts fail.

    The function returns the result and the warnings. A pause takes no time and ends with a signal.
    """

    def failure(step):
        if step is None:
            return LaunchResult(exit_code=3, reason="not started")
        instance = InstanceResult(index=0, progress=Progress(step, resumed=3))
        return LaunchResult(exit_code=7, instances=(instance,), hung=(0,), may_restart=True)

    def run(num_failures, number=0, steps=None, firsts=None, late=0, **options):
        failures = [failure(step) for step in steps or [3] * num_failures]
        for index, first in enumerate(firsts or ()):
            failures[index] = replace(failures[index], first_failure=first, hung=())
        results = iter([*failures, LaunchResult(exit_code=0)])

        def supervise(*_, **__):
            result = next(results)
            if late:
                signal.raise_signal(late)
            if result.reason == "not started":
                raise StartError(result.reason)
            return result

        monkeypatch.setattr(attempts, "supervise", supervise)
        if not late:
            monkeypatch.setattr(attempts, "pause", lambda *_: number)
        plan, console = plan_with_folder(None, **options), KeptConsole()
        with RunRecord(plan, console) as record:
            return attempts.Attempts(plan, record, console).run(), console.of("warn")

    return run


def test_job_is_run_again_with_growing_pauses(job):
    result, warnings = job(3, max_restarts=5)
    assert [line for line in warnings if line.startswith("restart")] == [
        "restarting the job in 1 s (restart 1 of 5)",
        "restarting the job in 2 s (restart 2 of 5)",
        "restarting the job in 4 s (restart 3 of 5)",
    ]  # fmt: skip
    assert (result.exit_code, result.restart_count) == (0, 3)


def test_after_progress_a_restart_with_states_in_memory_is_not_delayed(job):
    _, warnings = job(4, steps=[3, 3, 5, 3], max_restarts=4, memory_checkpoints=True)
    assert [line for line in warnings if line.startswith("restart")] == [
        "restarting the job in 1 s (restart 1 of 4)",
        "restarting the job in 2 s (restart 2 of 4)",
        "restarting the job at once (restart 3 of 4)",
        "restarting the job in 1 s (restart 4 of 4)",
    ]  # fmt: skip
    _, warnings = job(2, steps=[5, 5], max_restarts=4)
    assert warnings[-1] == "restarting the job in 2 s (restart 2 of 4)"


def test_with_states_in_memory_the_pauses_do_not_grow_after_kills(job):
    killed = InstanceResult(index=0, code=-signal.SIGKILL)
    lost = InstanceResult(index=0, code=-signal.SIGKILL, was_lost=True, oom_kills=1)
    firsts = [killed, lost, None, killed, InstanceResult(index=0, code=-9, oom_kills=1), killed]
    _, warnings = job(6, firsts=firsts, max_restarts=6, memory_checkpoints=True)
    restarts = [line for line in warnings if line.startswith("restart")]
    assert [line.partition(" in ")[2].partition(" (")[0] for line in restarts] == [
        "1 s", "1 s", "1 s", "1 s", "2 s", "1 s"
    ]  # fmt: skip
    _, warnings = job(2, firsts=[killed, killed], max_restarts=6)
    assert warnings[-1] == "restarting the job in 2 s (restart 2 of 6)"


def test_with_states_in_memory_a_restart_that_does_not_start_is_a_failed_attempt(job):
    result, warnings = job(2, steps=[5, None], max_restarts=4, memory_checkpoints=True)
    assert result.exit_code == 0
    assert warnings[-2:] == ["error: not started", "restarting the job in 1 s (restart 2 of 4)"]
    with pytest.raises(StartError):
        job(2, steps=[5, None], max_restarts=4)
    with pytest.raises(StartError):
        job(1, steps=[None], max_restarts=4, memory_checkpoints=True)


def test_states_in_memory_are_copied_if_the_last_restart_does_not_start(job, monkeypatch):
    copied = []
    monkeypatch.setattr(
        attempts.SavedStates, "finish", lambda _, result: copied.append(result.reason) or result
    )
    job(2, steps=[5, None], max_restarts=1, memory_checkpoints=True)
    assert copied == ["not started"]


def test_restarts_are_used_up(job):
    result, _ = job(9, max_restarts=2)
    assert (result.exit_code, result.restart_count) == (7, 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_signal_between_two_runs_ends_the_job(job, number, code):
    result, _ = job(9, number=number, max_restarts=2)
    assert (result.exit_code, result.hung, result.restart_count) == (code, (), 0)
    assert result.reason == f"{number.name} received before restart 1"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_at_the_end_of_an_attempt_ends_the_job(job, number, code):
    result, _ = job(2, steps=[5, 5], late=number, max_restarts=2, memory_checkpoints=True)
    assert (result.exit_code, result.restart_count) == (code, 0)
    assert job(0, late=number)[0].exit_code == 0


def test_a_restart_that_no_time_is_left_for_is_neither_told_nor_waited_for(job):
    result, warnings = job(9, max_restarts=5, timeout=3.5)
    assert [line[:23] for line in warnings if "restart" in line] == [
        "restarting the job in 1", "restarting the job in 2", "the job is not restarte"
    ]  # fmt: skip
    assert (result.exit_code, result.restart_count) == (7, 2)


def test_pause_tells_of_the_signal_that_ended_it():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.pthread_kill(threading.get_ident(), number)
        assert pause(20, os.getppid()) == signal.SIGTERM
        assert not signal.sigpending() & {signal.SIGTERM, signal.SIGUSR2}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert pause(0.001, os.getppid()) == pause(0, os.getppid()) == 0


def test_pause_has_an_end():
    assert backoff_seconds(1000) == 60.0


def test_the_end_of_the_process_that_started_the_job_ends_a_pause(tmp_path):
    # The job's parent ends while the job waits before its first restart.
    launcher = [
        sys.executable,
        "-m",
        "poprun_py",
        "--max-restarts",
        "9",
        "--output-dir",
        "out",
        "false",
    ]
    parent = (
        "import subprocess, sys\n"
        f"job = subprocess.Popen({launcher}, stderr=subprocess.PIPE, text=True)\n"
        "any('restart 1' in line for line in job.stderr)\n"
    )
    environ = {**os.environ, "POPRUN_LEASES": "none"}
    subprocess.run([sys.executable, "-c", parent], cwd=tmp_path, env=environ, check=True)
    path = tmp_path / "out" / "latest" / "report.json"
    wait_until(lambda: json.loads(path.read_text())["state"] == "ended")
    report = json.loads(path.read_text())
    assert (report["exit_code"], report["reason"]) == (129, "SIGHUP received before restart 1")
