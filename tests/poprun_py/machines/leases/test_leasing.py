"""A job takes, shares or waits for cores of this machine, or is refused, with messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from support.processes import wait_until

from poprun_py.command.cli import run
from poprun_py.errors import StartError, UsageError
from poprun_py.launching import wait_for_resources
from poprun_py.launching.job_cores import CoreRequest
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.machines import lease_files
from poprun_py.machines.lease_files import LeaseFolder
from poprun_py.machines.leases import LeaseTable
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import HostShare

time_sleep = time.sleep


def share(*cpus):
    return HostShare((), frozenset(cpus), frozenset({0}), (cpus,))


@pytest.fixture
def job(place, monkeypatch):
    """Lease one of CPUs 0 and 1, whichever is left; both are the whole machine."""
    monkeypatch.setenv("POPRUN_LEASES", str(place))
    said = SimpleNamespace(log=[], warn=[], tell=[], binding=[])
    console = SimpleNamespace(**{name: lines.append for name, lines in vars(said).items()})
    waits = []

    def take(*, cores=1, progress=None, **options):
        console.waiting = progress or (lambda *wait: waits.append(wait))

        def beside(held):
            left = [cpu for cpu in (0, 1) if cpu not in held]
            return share(*left[:cores]) if len(left) >= cores else None

        config = LaunchConfig(program=("/x/train.py",), **options)
        wait = Wait(config, console)
        found, lease = CoreRequest(
            config, share(*range(cores)), beside, console, wait, held
        ).lease()
        return SimpleNamespace(share=found, lease=lease, waited_seconds=wait.seconds)

    take.said, take.waits = said, waits
    with contextlib.ExitStack() as held:
        yield take


def test_a_job_alone_prints_nothing_about_leases(job, holder):
    leased = job()
    assert leased.share.cpus == {0}
    assert vars(job.said) == {"log": [], "warn": [], "tell": [], "binding": []}
    seen = holder("look").seen["outer"][0]
    assert (seen["program"], seen["cpus"]) == ("train.py", [0])


def test_other_jobs_are_only_logged_if_they_do_not_change_the_plan(job, holder):
    holder(cpus="1")
    leased = job()
    assert leased.share.cpus == {0}
    assert "has held CPU 1 since" in job.said.log[0]
    assert "this job shares the memory of a NUMA node with" in job.said.log[1]
    assert (job.said.tell, job.said.warn) == ([], [])


def test_other_jobs_that_change_the_plan_are_named(job, holder):
    other = holder(cpus="0").process
    assert job().share.cpus == {1}
    assert job.said.tell == [
        line for line in job.said.tell
        if f"holder (pid {other.pid}) has held CPU 0 since" in line and "this job has CPU 1" in line
    ]  # fmt: skip
    assert len(job.said.tell) == 1


@pytest.mark.parametrize(
    "options", [{"share_cores": "no"}, {"cores_per_instance": 1}, {"reserve_cores": 1}]
)
def test_an_error_names_the_options_that_help_and_then_the_other_jobs(job, holder, options):
    other = holder(cpus="0-1").process
    with pytest.raises(StartError) as caught:
        job(**options)
    assert str(caught.value).startswith(
        "this job got no CPUs; add --share-cores yes or --wait-for-resources: holder (pid "
        f"{other.pid}) holds CPUs 0-1"
    )
    assert len(list(holder("look").seen["jobs"])) == 1


def test_by_default_a_job_shares_cores_and_warns_in_one_line(job, holder):
    other = holder(cpus="0-1").process
    assert job().share.cpus == {0}
    assert job.said.warn == [
        (
            f"this job shares CPU 0 with holder (pid {other.pid}); to avoid sharing, give "
            "--share-cores no or --wait-for-resources"
        )
    ]
    assert (job.said.tell, job.said.log) == ([], [])


@pytest.mark.parametrize("options", [{"cores_per_instance": 1}, {"wait_for_resources": "forever"}])
def test_the_cores_of_a_shareable_lease_are_shared_even_by_a_job_that_asks_or_waits(
    job, holder, options
):
    holder("hold-shareable", cpus="0-1")
    assert job(**options).share.cpus == {0}
    assert job.waits == []
    assert job.said.warn[0].startswith("this job shares CPU 0 with holder")
    with pytest.raises(StartError, match="holds CPUs 0-1"):
        job(share_cores="no")


def test_a_job_that_may_not_share_may_wait_also_for_shareable_cores(job, holder):
    holder("hold-shareable", cpus="0-1")
    with pytest.raises(StartError, match=r"\(the time of"):
        job(share_cores="no", wait_for_resources=0.1)
    assert job.waits
    with pytest.raises(UsageError, match="cannot be used together"):
        job(share_cores="yes", wait_for_resources=0.1)


def test_a_suspended_job_leaves_its_cores_to_others(job, holder):
    other = holder(cpus="0-1").process
    with pytest.raises(StartError):
        job(cores_per_instance=1)
    other.send_signal(signal.SIGSTOP)
    wait_until(lambda: holder("look").seen["jobs"][0]["shareable"])
    assert job(cores_per_instance=1).share.cpus == {0}


def test_a_job_that_shares_does_not_delay_the_jobs_that_wait(job, holder):
    first = holder(cpus="0-1").process
    came_later = []

    def progress(_, reason):
        if reason and not came_later:
            came_later.append(holder("hold-shared", cpus="0-1"))
            first.kill()
            first.wait()

    assert job(wait_for_resources="forever", progress=progress).share.cpus == {0}
    # A job that was there before the waiting job is waited for.
    assert came_later[0].process.poll() is None
    with pytest.raises(StartError, match=r"holds CPUs 0-1.* \(the time of wait_for_resources=0.1"):
        job(cores_per_instance=2, wait_for_resources=0.1)


def test_sharing_takes_all_cores_and_warns(job, holder):
    holder(cpus="0")
    leased = job(cores=2, share_cores="yes")
    assert leased.share.cpus == {0, 1}
    assert len(job.said.warn) == 1
    assert job.said.warn[0].startswith("this job shares CPU 0 with holder (pid ")
    assert "--share-cores" not in job.said.warn[0]
    assert holder("look").seen["outer"][0]["shared"] is True


def test_cores_are_not_shared_if_others_are_free(job, holder):
    holder(cpus="0")
    assert job(share_cores=True).share.cpus == {1}
    assert job.said.warn == []
    assert holder("look").seen["outer"][0]["shared"] is False


def test_a_waiting_job_goes_first(job, holder):
    waiter = holder("queue").process
    with pytest.raises(StartError, match=r"waiter \(pid \d+\) is ahead in the queue for " r"CPUs"):
        job(cores_per_instance=1)
    # By default a job starts nevertheless, with a shared lease that the waiting job ignores.
    started = job()
    assert (started.share.cpus, job.said.warn) == ({0}, [])
    assert holder("look").seen["outer"][0]["shared"] is True
    started.lease.close()
    waiter.communicate("")
    assert job(cores_per_instance=1).share.cpus == {0}


def test_waiting_ends_when_the_other_job_ends(job, holder, place):
    other = holder(cpus="0-1").process
    lines = []

    def progress(seconds, reason):
        lines.append((int(seconds), reason))
        if other.poll() is None and reason:
            other.kill()
            other.wait()

    leased = job(wait_for_resources="forever", progress=progress)
    assert leased.share.cpus == {0}
    assert leased.waited_seconds > 0
    assert lines[0][0] == 0
    assert lines[0][1].startswith("for CPUs (place 1 of 1 in the queue): ")
    assert lines[-1][1] == ""
    assert len(list(place.glob("ticket-*"))) == 0


def test_waiting_has_a_time_out(job, holder, place):
    holder(cpus="0-1")
    began = time.monotonic()
    with pytest.raises(
        StartError,
        match=r"holds .*\(the time of wait_for_resources=0.3 is "
        r"over\)$",
    ):
        job(wait_for_resources=0.3)
    assert time.monotonic() - began >= 0.3
    assert {reason[:11] for _, reason in job.waits} == {"for CPUs (p", ""}
    assert list(place.glob("ticket-*")) == []


def test_a_stopped_job_keeps_its_place_in_the_queue_but_does_not_block_it(job, holder):
    waiter = holder("queue").process
    waiter.send_signal(signal.SIGSTOP)
    wait_until(lambda: holder("look").seen["ahead"] == 0)
    job().lease.close()
    waiter.send_signal(signal.SIGCONT)
    wait_until(lambda: holder("look").seen["ahead"] == 1)
    with pytest.raises(StartError, match="ahead in the queue"):
        job(share_cores="no")


def test_a_locked_mutex_neither_ends_waiting_nor_starts_a_job(job, holder, place, monkeypatch):
    monkeypatch.setattr(lease_files, "_MUTEX_SECONDS", 0.05)
    holder(cpus="0-1")
    with contextlib.closing(LeaseFolder(place)) as other, other.mutex():
        with pytest.raises(
            StartError, match=f"^{place}: another process keeps this folder .*is over"
        ):
            job(wait_for_resources=0.2)
        assert "for the lock of the folder of leases" in job.waits[0][1]
        # A job that does not wait runs without a lease, with a warning.
        assert job(cores=2).lease.cpus == ()
    assert "the cores of this job are not leased, so other jobs may use" in job.said.warn[0]
    with pytest.raises(StartError, match="holds CPUs 0-1"):
        job(wait_for_resources=0.1)


def test_a_job_that_cannot_join_the_queue_waits_behind_it(job, holder, monkeypatch):
    other = holder(cpus="0-1").process

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LeaseTable, "join_queue", full)

    def progress(_, reason):
        if reason and other.poll() is None:
            other.kill()
            other.wait()

    assert job(wait_for_resources="forever", progress=progress).share.cpus == {0}


@pytest.mark.sweep
def test_jobs_in_a_long_queue_check_less_often(job, holder, monkeypatch):
    pauses = []
    monkeypatch.setattr(
        wait_for_resources.time, "sleep", lambda s: (pauses.append(s), time_sleep(0.01))
    )
    for _ in range(3):
        holder("queue")
    with pytest.raises(StartError):
        job(wait_for_resources=0.9)
    # Other threads of this process also sleep, but for shorter times.
    assert max(pauses) == pytest.approx(0.8)


def test_ctrl_c_ends_waiting_at_once(job, holder, place):
    holder(cpus="0-1")

    def interrupt():
        wait_until(lambda: job.waits)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        job(wait_for_resources="forever")
    thread.join()
    assert list(place.glob("ticket-*")) == []


def test_leases_and_waiting_jobs_are_printed(job, holder, place, capsys):
    assert run(["--print-leases"]) == 0
    assert capsys.readouterr().out == "no job holds CPUs of this machine\n"
    pids = [holder(cpus="0-2,5").process.pid, holder("queue").process.pid]
    assert run(["--print-leases"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows] == ["pid", *map(str, pids)]
    assert (rows[1][4], rows[2][4:6]) == ("0-2,5", ["waits", "(1)"])
    assert run(["--print-leases=json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["pid"] for each in told["jobs"] + told["waiting"]] == pids
    assert run(["--print-leases", "-n", "2"]) == 0
    assert "--num-instances has no effect: --print-leases only queries" in capsys.readouterr().err
    place.chmod(0o777)
    assert run(["--print-leases"]) == 3
    assert f"chmod 1777 {place}" in capsys.readouterr().err


def test_leases_are_turned_off_by_none(job, holder, place, monkeypatch):
    holder(cpus="0-1")
    monkeypatch.setenv("POPRUN_LEASES", "none")
    leased = job(cores=2)
    assert (leased.share.cpus, leased.lease.cpus) == ({0, 1}, ())
    monkeypatch.setenv("POPRUN_LEASES", "here")
    with pytest.raises(UsageError, match="expected the absolute path of a folder, or none"):
        job()


def test_without_a_usable_folder_a_job_runs_with_a_warning(job, place):
    place.write_text("no folder")
    leased = job()
    assert leased.lease.cpus == ()
    assert len(job.said.warn) == 1
    assert (
        f"the cores of this job are not leased, so other jobs may use the same cores: {place}: "
        "Not a directory"
    ) in job.said.warn[0]


def test_on_a_full_disk_a_job_runs_with_a_warning_beside_the_leases_of_others(
    job, holder, place, monkeypatch
):
    holder(cpus="0")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    leased = job()
    assert (leased.share.cpus, leased.lease.cpus) == ({1}, ())
    assert f"{place}: No space left on device" in job.said.warn[0]
