"""The end of a program that has started a job: the job and its files are gone in every case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT
from support.terminals import Typist

pytestmark = pytest.mark.mpi

STARTED = """
import time, poprun_py
job = poprun_py.start(
    ["sh", "-c", "echo up; exec sleep 100"], num_instances=2, share_cores=True, grace=2
)
while job.output().count("up") < 2:
    time.sleep(0.01)
print("up", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "number", "code"),
    [
        ("del job", 0, 0),
        pytest.param(
            "with job: job.wait()", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.sweep
        ),
        # While a forked process runs, the launcher must notice the end of this program.
        (
            "import os\n"
            "if os.fork() == 0:\n"
            "    time.sleep(600)\n"
            "    os._exit(0)\n"
            "print('forked', flush=True)\n"
            "job.wait()",
            signal.SIGKILL,
            -signal.SIGKILL,
        ),
    ],
)
def test_the_job_ends_when_the_program_ends(then, number, code, tmp_path):
    mark = f"TEST_MARK_OF_JOBS={os.getpid()}-{tmp_path}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environ[mark.partition("=")[0]] = mark.partition("=")[2]
    program = subprocess.Popen(
        [sys.executable, "-c", STARTED + then], env=environ, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert program.stdout.readline() == "up\n"
        if "fork" in then:
            assert program.stdout.readline() == "forked\n"
        if number:
            program.send_signal(number)
        assert program.wait(60) == code
        forked = {pid for pid in survivors(mark) if "poprun_py.start" in _command(pid)}
        wait_until(lambda: not set(survivors(mark)) - forked)
        assert "fork" not in then or forked
        wait_until(lambda: list(tmp_path.iterdir()) == [])
    finally:
        program.kill()
        for pid in survivors(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.communicate()


def _command(pid):
    """Return the command of a process, or an empty text if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


PATIENT = """
import signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append("INT"))
signal.signal(signal.SIGTERM, lambda *_: asked.append("TERM"))
print("up", flush=True)
while not asked:
    time.sleep(0.01)
time.sleep(0.3)
print("saved", *asked, flush=True)
"""


def test_ctrl_c_in_a_terminal_counts_once(script):
    """The terminal signals the launcher, too. A second request would kill a program that saves."""
    program = script(PATIENT)
    code = (
        "import poprun_py\n"
        f"try: poprun_py.launch([{str(program)!r}], share_cores=True)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    with Typist([sys.executable, "-c", code]) as user:
        user.expect("up")
        user.type("\x03")
        assert user.ended() == 0
    assert "saved INT\r\n" in user.seen
    assert user.seen.endswith("interrupted\r\n")
    assert "Traceback" not in user.seen


@pytest.mark.sweep
def test_a_second_ctrl_c_kills_a_program_that_saves_too_long(script):
    program = script(PATIENT.replace("0.3", "60"))
    code = f"import poprun_py\npoprun_py.launch([{str(program)!r}], share_cores=True, grace=60)"
    with Typist([sys.executable, "-c", code]) as user:
        user.expect("up")
        user.type("\x03")
        user.expect("Ctrl-C again to kill the instances at once")
        again_at = time.monotonic() + 0.4  # two within 0.3 s count once
        user.wait_until(lambda: time.monotonic() > again_at)
        user.type("\x03")
        assert user.ended() == -signal.SIGINT
    assert "saved" not in user.seen
