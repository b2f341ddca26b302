"""Commands in a copy of the project: where they write, how they end, what is left out."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

from tools.running.project_copy import project_copy

# A program that does not end on SIGTERM.
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('begun', flush=True); time.sleep(100)"
)


@pytest.fixture
def mark(monkeypatch):
    """Mark all processes of a test, and wait until they have ended."""
    value = f"project-copy-{time.monotonic_ns()}"
    monkeypatch.setenv("PROJECT_COPY_TEST_MARK", value)
    yield
    wait_until(lambda: not survivors(f"PROJECT_COPY_TEST_MARK={value}"), 20, "processes are left")


@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('why'); raise SystemExit(3)", "exit code 3, expected 0"),
        (f"import subprocess, sys; subprocess.run([sys.executable, '-c', {DEAF!r}])",
         "did not end within 2 s"),
    ],
)  # fmt: skip
def test_failures_are_described_and_leave_no_process(program, words):
    with project_copy() as here:
        done = here.run(("python", "-c", program), ".", {}, 2)
    assert done.problem(0, 2) == words
    assert done.lines in (("why",), ("begun",))


@pytest.mark.usefixtures("mark")
def test_signal_ends_the_command_and_removes_the_copy():
    ends = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGTERM)}); time.sleep(100)"
    with pytest.raises(SystemExit) as caught, project_copy() as here:
        here.run(("python", "-c", ends), ".", {}, 30)
    assert caught.value.code == 143
    assert not here.folder.exists()


@pytest.mark.examples
@pytest.mark.mpi
@pytest.mark.usefixtures("mark")
def test_job_that_takes_too_long_leaves_no_instance():
    sleeps = "print('begun', flush=True); import time; time.sleep(100)"
    words = ("python", "-m", "poprun_py", "-n", "2", "python", "-c", sleeps)
    with project_copy() as here:
        done = here.run(words, ".", {}, 8)
    assert done.problem(0, 8) == "did not end within 8 s"
    assert sum("begun" in line for line in done.lines) == 2


def test_commands_write_into_a_copy():
    with project_copy() as here:
        for folder in (".", "examples/common"):
            done = here.run(("python", "-c", "open('new', 'w')"), folder, {}, 30)
            assert done.code == 0
            assert (here.project / folder / "new").exists()
            assert not (ROOT / folder / "new").exists()
        done = here.run(("python", "-c", "import os; print(os.getcwd(), '{data}')"), ".", {}, 30)
        assert done.lines == ("poprun-py data",)


LISTING = """Graphcore device listing:
Partition: emulated [active]
-+- Id: [0], target: [Fabric], IPU-M host: [localhost], IPU#: [3], in use by: [12]
-+- Id: [1], target: [Fabric], IPU-M host: [localhost], IPU#: [2]
-+- Id: [2], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [localhost], IPU#: [3]
"""
OTHER_JOB = LISTING.partition("\n")[2].replace("emulated", "job-17764")


@pytest.mark.parametrize("others", ["", OTHER_JOB, OTHER_JOB * 2])
def test_other_jobs_of_the_machine_are_not_shown(others):
    with project_copy() as here:
        done = here.run(("python", "-c", f"print({LISTING + others!r}, end='')"), ".", {}, 30)
    assert list(done.lines) == LISTING.replace(", in use by: [12]", "").splitlines()
