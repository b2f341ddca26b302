"""The list of this machine's jobs, made of leases and answers, and the job that a word names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.launcher.run_folders import view_of

from poprun_py import process_info
from poprun_py.command import jobs as jobs_command
from poprun_py.command import machine_jobs
from poprun_py.command.cli import run
from poprun_py.command.machine_jobs import MachineJob, find_job, joined
from poprun_py.errors import UsageError
from poprun_py.machines.lease_files import JobProcess, LeaseRecord, QueueRecord
from poprun_py.running.supervise.launcher_queries import LauncherAnswer

OWN, OTHER = str(os.geteuid()), "65534"
SOCKET = Path("/tmp/poprun-1/control")
GONE = 1 << 22  # no process has this id


def lease(pid, run_id="", user=OWN, *, cpus=(0, 1), since=10.0, shared=False):
    job = JobProcess(pid, 77, "train.py", run_id)
    return LeaseRecord(f"lease-{pid}-0", user, job, cpus, (0,), since, shared)


def answer(pid, run_id, **values):
    status = {**view_of(2, 5.0).to_json(), "run_id": run_id, "pid": pid, **values}
    return LauncherAnswer(pid, SOCKET, status)


def test_a_job_has_what_its_lease_and_its_launcher_tell():
    (job,) = joined([lease(GONE, "a", shared=True)], [], [answer(GONE, "a")], now=100.0)
    assert (job.run_id, job.pid, job.cpus, job.is_shared) == ("a", GONE, (0, 1), True)
    assert (job.state, job.num_instances, job.since) == ("running", 2, 10.0)
    assert job.socket == SOCKET
    assert job.is_own


def test_a_job_without_a_lease_is_listed_and_sorted_by_its_start():
    jobs = joined([lease(GONE, "new", since=90.0)], [], [answer(GONE + 1, "old")], now=92.0)
    assert [(job.run_id, job.cpus, job.since) for job in jobs] == [
        ("old", (), 87.0), ("new", (0, 1), 90.0),
    ]  # fmt: skip


def test_waiting_preparing_and_others_jobs_are_listed(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1)
    waiting = QueueRecord("ticket-1", "1", JobProcess(GONE, 77, "next.py"), 1, 5.0)
    jobs = joined([lease(GONE + 1, "mine", "1"), lease(GONE + 2, "hers", OTHER)], [waiting], [],
                  now=20.0)  # fmt: skip
    assert [(job.pid - GONE, job.state, job.is_own) for job in jobs] == [
        (0, "waiting", True), (1, "preparing", True), (2, "", False),
    ]  # fmt: skip


def test_a_launcher_without_an_answer_is_listed(tmp_path):
    silent = LauncherAnswer(os.getpid(), SOCKET, None, "launcher 5 does not answer")
    (job,) = joined([], [], [silent], now=1.0)
    assert (job.state, job.run_id, job.title) == ("no answer", "", f"launcher {os.getpid()}")


def test_a_job_of_another_host_has_no_launcher_here():
    """The lease names the parent of the wrappers, which is MPI's daemon."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', sys.argv[1]])"
    daemon = subprocess.Popen(
        [sys.executable, "-c", code, "/x/start_wrapper.py"], stdin=subprocess.PIPE
    )
    with daemon:
        while not process_info.children_by_parent().get(daemon.pid):
            pass
        (job,) = joined([lease(daemon.pid, "far")], [], [], now=20.0)
        assert job.state == "from another host"
        with pytest.raises(
            UsageError, match="was launched on another host; stop the job on that host"
        ):
            find_job("far", [job])
        # This host's launcher may have leased cores here under another name of this host.
        assert [each.pid for each in joined([lease(daemon.pid, "far")], [], [answer(GONE, "far")],
                                            now=20.0)] == [GONE]  # fmt: skip
        daemon.communicate(b"\n")


def made(run_id, pid, *, is_own=True, user="ann"):
    return MachineJob(run_id=run_id, pid=pid, user=user, is_own=is_own, since=0.0, state="running")


JOBS = [
    made("lr-3", GONE + 1), made("twin", GONE + 2), made("twin", GONE + 3),
    made("hers", GONE + 4, is_own=False), made("lr-3", GONE + 5, is_own=False),
]  # fmt: skip


@pytest.mark.parametrize("word", ["lr-3", str(GONE + 1), "runs/lr-3", "/x/lr-3/"])
def test_a_job_is_found_by_name_folder_and_process(word):
    assert find_job(word, JOBS).pid == GONE + 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("twin", (f"twin: 2 jobs have this name: twin (launcher {GONE + 2}), twin (launcher "
                  f"{GONE + 3}); give the process id of one launcher instead of the name")),
        ("hers", (f"hers (launcher {GONE + 4}) is a job of the user ann; only ann or root can "
                  "stop the job")),
        ("lr-4", "lr-4: no job of this name runs on this host; did you mean lr-3?; your "
                 f"running jobs: lr-3 (launcher {GONE + 1}), twin (launcher {GONE + 2})"),
        ("a\x1b[31m", "'a\\x1b[31m': no job of this name"),
        ("", "'': no job of this name runs on this host; your running jobs:"),
        ("9" * 5000, "no job of this name runs on this host; your running jobs:"),
    ],
)  # fmt: skip
def test_a_word_that_names_no_single_job_is_refused(word, said):
    with pytest.raises(UsageError) as caught:
        find_job(word, JOBS)
    assert said in str(caught.value)


def test_a_job_of_root_is_stopped_by_root_only():
    with pytest.raises(UsageError, match="is a job of the user root; only root can stop the job"):
        find_job("system", [replace(JOBS[-1], run_id="system", user="root", is_own=False)])


def test_a_process_of_a_job_is_told_from_its_launcher():
    own = str(os.getpid())
    with pytest.raises(UsageError, match=f"{own}: this process is not the launcher of a job; your"):
        find_job(own, JOBS)
    with pytest.raises(UsageError, match=r"this process belongs to the job a \(launcher"):
        find_job(str(os.getpid()), [made("a", os.getppid())])
    with pytest.raises(UsageError, match="none of your jobs runs on this host"):
        find_job("a", [])


def test_the_table_and_the_json_document(monkeypatch, capsys):
    job = MachineJob(
        run_id="lr-3", pid=4711, user="ann", is_own=True, since=0.0, state="running",
        program="train.py", num_instances=2, cpus=(0, 1, 2), is_shared=True, step=12,
        samples_per_second=345.0,
    )  # fmt: skip
    monkeypatch.setattr(jobs_command, "jobs_of_machine", lambda: [job, made("", 5, is_own=False)])
    assert run(["jobs"]) == 0
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "user", "pid", "program", "state", "instances", "CPUs", "since",
                            "step", "samples/s"]  # fmt: skip
    assert first.split()[:7] == ["lr-3", "ann", "4711", "train.py", "running", "2", "0-2"]
    assert first.split()[-2:] == ["12", "345"]
    assert second.split()[:5] == ["-", "ann", "5", "-", "running"]
    assert run(["jobs", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == 1
    assert document["jobs"][0] == {
        "run_id": "lr-3", "pid": 4711, "user": "ann", "own": True, "program": "train.py",
        "state": "running", "num_instances": 2, "since": 0.0, "cpus": [0, 1, 2], "shared": True,
        "step": 12, "samples_per_second": 345.0,
    }  # fmt: skip


def test_a_narrow_terminal_shows_names_and_processes():
    lines = jobs_command.job_lines([made("lr-3", 4711)], width=12, now=1.0)
    assert lines[-1].split() == ["lr-3", "4711"]


def test_unreadable_leases_hide_no_job_of_the_user(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("POPRUN_LEASES", str(tmp_path / "file"))
    monkeypatch.setattr(
        "poprun_py.running.supervise.launcher_queries.all_answers", lambda: [answer(GONE, "a")]
    )
    assert [job.run_id for job in machine_jobs.jobs_of_machine()] == ["a"]
    assert (
        "warning: jobs of other users cannot be listed, because the folder of CPU leases "
        "cannot be read: "
    ) in capsys.readouterr().err
