"""Only the launcher itself is signalled, its end is awaited, and it tells how the job ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from support.processes import wait_until

from poprun_py import process_info
from poprun_py.running.supervise import launcher_end
from poprun_py.running.supervise.launcher_end import EndingLauncher, JobEnd, parse_end

# A process that answers as a launcher does: a question about the end, after SIGTERM.
LISTENS = """
import signal, socket, sys
sys.path.insert(0, sys.argv[2])
from poprun_py.instance import control_protocol
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(flush=True)
channel = listener.accept()[0]
signal.sigwait({signal.SIGTERM})
channel.sendall(control_protocol.pack(
    control_protocol.STACKS, b'{"exit_code": 75, "reason": "SIGTERM received", "may_restart": 0}'))
"""


@pytest.fixture
def listening(tmp_path, pytestconfig):
    path = tmp_path / "control"
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(path), str(pytestconfig.rootpath)],
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        yield process, path
        process.kill()


@pytest.fixture
def sleeping():
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_launcher_ends_and_tells_how_even_if_it_was_stopped(listening, monkeypatch, has_pidfds):
    process, path = listening
    if not has_pidfds:
        monkeypatch.setattr("os.pidfd_open", lambda _: (_ for _ in ()).throw(PermissionError()))
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: process_info.state_letter(process.pid) == "T")
    with EndingLauncher(process.pid, path) as launcher:
        assert not launcher.wait(0.0)
        launcher.end()
        assert launcher.wait(20.0)
        assert launcher.told_end() == JobEnd(75, "SIGTERM received")
        launcher.wait(None)
    process.wait()


def test_a_process_that_does_not_own_the_socket_is_not_signalled(listening, sleeping, tmp_path):
    _, path = listening
    for other in (path, tmp_path / "missing"):
        with pytest.raises(ProcessLookupError):
            EndingLauncher(sleeping.pid, other)
    assert sleeping.poll() is None


def test_a_process_with_another_start_time_is_not_signalled(sleeping):
    """A launcher without a socket has ended, and its process id was given to another process."""
    ticks = process_info.start_ticks(sleeping.pid)
    with pytest.raises(ProcessLookupError):
        EndingLauncher(sleeping.pid, None, ticks + 1)
    with EndingLauncher(sleeping.pid, None, ticks) as launcher:
        launcher.end()
        assert launcher.wait(20.0)
        assert launcher.told_end() == JobEnd()
    assert sleeping.wait() == -signal.SIGTERM


def test_an_ended_process_is_none():
    with pytest.raises(ProcessLookupError):
        EndingLauncher(1 << 22, None, 5)


END = {"exit_code": 143, "reason": "SIGTERM\x1b received", "may_restart": False}


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (json.dumps(END).encode(), JobEnd(143, "SIGTERM? received")),
        (json.dumps({**END, "may_restart": True}).encode(), JobEnd()),
        (b"", JobEnd()), (b"[]", JobEnd()), (b"\xff", JobEnd()), (b"[" * 100_000, JobEnd()),
        (json.dumps({**END, "exit_code": "0"}).encode(), JobEnd()),
    ],
    ids=str,
)  # fmt: skip
def test_the_answer_of_a_launcher_is_checked(answer, end):
    assert parse_end(answer) == end


def test_signals_need_an_open_process(sleeping, monkeypatch):
    """Without pidfds, the start time is compared once more before each signal."""
    monkeypatch.setattr(launcher_end, "_open_process", lambda _: None)
    ticks = process_info.start_ticks(sleeping.pid)
    with EndingLauncher(sleeping.pid, None, ticks) as launcher:
        launcher._start_ticks += 1
        with monkeypatch.context() as patch:
            patch.setattr("os.kill", lambda *_: pytest.fail("another process is signalled"))
            launcher.end()
