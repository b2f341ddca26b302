"""The handle of a job: its status, its output, waiting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import threading
import time
import weakref
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import wait_until

import poprun_py
from poprun_py import JobFailedError, StartError, TimeLimitError, UsageError
from poprun_py.instance.job_folders import remove_abandoned
from poprun_py.python_api import handle
from poprun_py.python_api.launcher_child import OutputCopier

pytestmark = pytest.mark.mpi

FILES = Path("/proc/self/fd")
TALKS = ("sh", "-c", "echo out $RANK; echo err $RANK >&2; exec sleep 100")


@pytest.fixture(scope="module")
def running(own_leases):
    """A job whose two instances have both written to stdout and stderr."""
    with poprun_py.start(TALKS, num_instances=2, share_cores=True) as job:
        wait_until(lambda: job.output().count("err ") == 2)
        yield job


def test_the_status_of_a_running_job(running):
    status = running.status()
    assert (status.state, status.num_instances, status.exit_code) == ("running", 2, None)
    assert status.run_id == status.view.run_id
    assert [each.index for each in status.view.instances] == [0, 1]
    assert status.view.pid == status.pid != os.getpid()
    before, seconds = time.monotonic(), running.status().seconds
    assert 0 < status.seconds <= seconds
    assert running.status().seconds - seconds <= time.monotonic() - before
    assert not running.done()


def test_output_of_one_instance_of_all_instances_and_of_the_command(running):
    assert running.output(1) == "out 1\nerr 1\n"
    assert running.output(0, "stderr") == "err 0\n"
    assert running.output(stream="stdout") == "out 0\nout 1\n"
    assert sorted(running.output().splitlines()) == [
        f"[1,{index}]<std{stream}>:{stream} {index}"
        for index in (0, 1)
        for stream in ("err", "out")
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda job: job.output(2),
            "instance 2: expected an index from 0 to 1, or None for all instances",
        ),
        (lambda job: job.output(-1), "instance -1: expected an index from 0 to 1"),
        (lambda job: job.output(0, "out"), "stream 'out': expected 'stdout', 'stderr' or None"),
        (
            lambda job: job.output("0"),
            "instance '0': expected an index from 0 to 1, or None for all instances",
        ),
        (lambda job: job.stop(grace=-1), "grace -1: expected a number of seconds, 0 or more"),
        (lambda job: job.stop(grace="1"), "grace '1': expected a number of seconds, 0 or more"),
        (lambda job: job.wait("1"), "timeout '1': expected seconds"),
        (lambda job: job.wait(float("nan")), "timeout nan: expected seconds"),
    ],
)
def test_wrong_arguments_of_methods_are_refused(call, said, running):
    with pytest.raises(UsageError) as caught:
        call(running)
    assert str(caught.value).startswith(said)
    assert running.status().state == "running"


def test_the_job_continues_after_a_timeout_of_wait_or_result(running):
    for ask in (running.wait, running.result):
        with pytest.raises(TimeoutError, match=r"job sh is still running after 0\.01 s"):
            ask(timeout=0.01)
        with pytest.raises(
            TimeoutError, match="job sh is still running after -1 s"
        ):  # a deadline has passed
            ask(timeout=-1)
    assert not running.done()


def test_a_forked_process_cannot_use_the_handle(running):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            running.wait(0)
        except StartError as error:
            os.write(write, f"{error}\n{running!r}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    refused, shown = os.read(read, 999).decode().splitlines()
    assert refused.startswith(f"the job sh was started by process {os.getpid()}")
    assert shown == "<JobHandle sh: started by another process>"
    os.close(read)
    assert running.status().view is not None


def test_stop_can_be_called_from_several_threads_and_again_after_the_end(tmp_path):
    options = {"output_dir": tmp_path, "run_name": "mine", "tag": {"lr": 0.1}}
    with poprun_py.start(TALKS, share_cores=True, **options) as job:
        assert job.report is None
        wait_until(lambda: "err" in job.output(0))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: job.stop(), range(4)))
        assert job.status().state in ("stopping", "ended")
        result = job.wait(60)
        assert (result.exit_code, result.reason) == (143, "SIGTERM received")
        assert (job.status().state, job.status().exit_code) == ("ended", 143)
        with pytest.raises(JobFailedError, match="SIGTERM") as caught:
            job.result()
        assert caught.value.result is result
        assert job.output(0, "stdout") == "out 0\n"
        job.stop()
    with pytest.raises(UsageError, match="files of the job have been removed"):
        job.output()
    assert job.wait() is result
    assert job.report == result.report == tmp_path / "mine" / "report.html"
    assert json.loads((tmp_path / "mine" / "report.json").read_text())["tags"] == {"lr": "0.1"}


def test_stop_without_grace_kills_a_program_that_ignores_signals(tmp_path, capsys):
    """The output is kept in the user's own folder and is not shown."""
    stubborn = ["sh", "-c", "trap '' TERM INT; echo up; while :; do sleep 0.1; done"]
    folder = tmp_path / "runs"
    with poprun_py.start(stubborn, share_cores=True, grace=100, output_dir=folder) as job:
        wait_until(lambda: job.output(0) == "up\n")
        job.stop(grace=0)
        result = job.wait(60)
        assert result.instances[0].code == -9
    kept = folder / result.run_id / "attempt-1" / "instance-0.stdout"
    assert kept.read_text() == "up\n"
    assert capsys.readouterr() == ("", "")


def test_a_job_can_be_stopped_before_its_programs_run():
    job = poprun_py.start(["true"])
    job.stop()
    with job:
        code = job.wait(60).exit_code
    # The program may end before the signal arrives.
    assert code in (0, 143)
    assert job.status().exit_code == code


def test_wait_raises_the_time_limit_and_the_folder_stays_until_close(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(list(FILES.iterdir()))
    with poprun_py.start(["sleep", 100], timeout=0.2, share_cores=True) as job:
        with pytest.raises(TimeLimitError, match=r"the time limit of 0\.2 s is over") as caught:
            job.wait(60)
        assert caught.value.result.timed_out
        assert job.status().exit_code == 124
        [folder] = tmp_path.iterdir()
        remove_abandoned([str(tmp_path)])
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []
    assert len(list(FILES.iterdir())) <= before


def test_wait_raises_for_a_killed_launcher_and_its_instances_end():
    with poprun_py.start(TALKS, num_instances=2, share_cores=True) as job:
        wait_until(lambda: job.output().count("err ") == 2)
        pids = [each.pid for each in job.status().view.instances]
        os.kill(job.status().pid, 9)
        with pytest.raises(
            JobFailedError, match="the launcher ended with signal SIGKILL"
        ) as caught:
            job.wait(60)
        assert caught.value.exit_code == 137
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # noqa: PTH110


def test_start_fails_if_the_listening_thread_cannot_be_started(monkeypatch, tmp_path):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", start)
        with pytest.raises(StartError, match="sleep cannot be monitored: can't start new thread"):
            poprun_py.start(["sleep", "100"])
    assert list(tmp_path.iterdir()) == []
    assert "sleep" not in {job.name for job in handle._running.values()}


def _children():
    """Return the ids of the child processes of this process, also of those that are not reaped."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split())


def _interrupted_thread(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name == "poprun_py job sleep":
            raise KeyboardInterrupt

    monkeypatch.setattr("threading.Thread.start", interrupted)


def _interrupted_handle(monkeypatch):
    def interrupted(name, read, launcher, folder):
        wait_until(lambda: launcher.attempts)
        raise KeyboardInterrupt

    monkeypatch.setattr("poprun_py.python_api.launch.JobHandle", interrupted)


@pytest.mark.parametrize("interrupt", [_interrupted_thread, _interrupted_handle])
@pytest.mark.parametrize("show", [False, True])
def test_an_interrupt_before_start_has_returned_ends_the_job(interrupt, show, monkeypatch):
    failed = []
    monkeypatch.setattr("threading.excepthook", lambda args: failed.append(args.exc_value))
    before = _children()
    with monkeypatch.context() as patch:
        interrupt(patch)
        with pytest.raises(KeyboardInterrupt):
            poprun_py.start(["sleep", "100"], share_cores=True, show=show)
    # A thread waits for the launcher, so the launcher is not a zombie.
    wait_until(lambda: _children() <= before)
    wait_until(lambda: "poprun_py job sleep" not in {each.name for each in threading.enumerate()})
    assert not failed


def test_start_fails_if_the_output_of_the_launcher_cannot_be_copied(monkeypatch, tmp_path):
    def no_file(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(OutputCopier, "__init__", no_file)
    before = _children()
    with pytest.raises(StartError, match="Too many open files"):
        poprun_py.start(["sleep", "100"], show=True)
    assert _children() <= before
    assert list(tmp_path.iterdir()) == []


def test_start_fails_if_there_are_no_descriptors_for_the_launcher(monkeypatch):
    def no_pair():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("socket.socketpair", no_pair)
    with pytest.raises(StartError, match=r"cannot be started .Too many open files"):
        poprun_py.start(["sleep", "100"])


def test_the_seconds_of_a_job_that_ended_before_its_handle_was_made(monkeypatch):
    def late(name, read, launcher, folder):
        futures.wait([launcher.outcome])
        return handle.JobHandle(name, read, launcher, folder)

    monkeypatch.setattr("poprun_py.python_api.launch.JobHandle", late)
    with poprun_py.start(["true"], share_cores=True) as job:
        assert job.status().seconds > 0


def test_an_error_in_the_listening_thread_ends_the_job(monkeypatch):
    failed = []
    monkeypatch.setattr("threading.excepthook", lambda args: failed.append(args.exc_type))
    monkeypatch.setattr(OutputCopier, "copy", lambda _: 1 / 0)
    ended = pytest.raises((StartError, JobFailedError), match="the launcher ended with exit code")
    with poprun_py.start(TALKS, share_cores=True, show=True) as job, ended:
        job.wait(60)
    assert failed == [ZeroDivisionError]


def _waited(job):
    job.wait()


def _awaited(job):
    async def wait():
        await job

    asyncio.run(wait())


def _cancelled_await(job):
    async def wait():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job, 0)

    asyncio.run(wait())
    job.wait()


@pytest.mark.sweep
@pytest.mark.parametrize("wait", [_waited, _awaited, _cancelled_await])
def test_a_finished_job_is_freed_with_its_handle(wait):
    """Its folder is removed as well, while the program still runs."""
    job = poprun_py.start(["true"], share_cores=True)
    folder, there = job._folder, weakref.ref(job)
    wait(job)
    del job

    def is_freed():
        gc.collect()
        return there() is None

    wait_until(is_freed)
    assert not folder.exists()


def test_only_the_end_of_long_output_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(handle, "MOST_READ_BYTES", 1 << 12)
    file = tmp_path / "instance-7.stdout"
    file.write_text("".join(f"line {number:8}\n" for number in range(500)))
    said = handle._read_end([file])
    assert said == file.read_text()[-len(said) :]
    assert 4000 < len(said) <= 1 << 12
    assert said.startswith("line ")


def test_the_end_of_output_in_several_parts_is_read_as_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr(handle, "MOST_READ_BYTES", 100)
    parts = [tmp_path / name for name in ("o.1", "o.2", "gone", "o")]
    for path, text in zip((parts[0], parts[1], parts[3]), ("first\n", "second\n", "last\n"),
                          strict=True):  # fmt: skip
        path.write_text(text)
    assert handle._read_end(parts) == "first\nsecond\nlast\n"
    parts[1].write_text("".join(f"line {number:3}\n" for number in range(50)))
    said = handle._read_end(parts)
    assert said == "".join(f"line {number:3}\n" for number in range(40, 50))[-90:] + "last\n"
    assert handle._read_end([tmp_path / "gone"]) == ""
