"""Limits of control groups, read from made-up files and enforced by the kernel."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from poprun_py.process_info import (
    memory_kills,
    memory_kills_and_limit,
    process_refusals_and_limit,
    throttled_seconds,
)
from tools.soak.faults import Fault, measure

PROCESSES_V1 = Path("/sys/fs/cgroup/pids")
MEMORY_V1 = Path("/sys/fs/cgroup/memory")


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_memory_of_a_group_of_version_2(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.events": "low 0\noom 3\noom_kill 2\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": "1000\n",
        },
    )
    assert memory_kills_and_limit(root) == (2, 1000)
    assert memory_kills(root) == 2


def test_memory_of_a_group_of_version_1(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n",
            "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory_kills_and_limit(root) == (1, 4096)
    assert memory_kills(root) == 1


@pytest.mark.parametrize(
    ("line", "folder"),
    [("0::/a/b\n", "sys/fs/cgroup"), ("8:pids:/a/b\n0::/\n", "sys/fs/cgroup/pids")],
)
def test_limit_of_processes(tmp_path, line, folder):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": line,
            f"{folder}/a/b/pids.events": "max 7\n",
            f"{folder}/a/b/pids.max": "max\n",
            f"{folder}/a/pids.max": "20\n",
        },
    )
    assert process_refusals_and_limit(root) == (7, 20)
    assert process_refusals_and_limit(str(tmp_path / "nothing")) == (0, None)


@pytest.mark.parametrize(
    "files",
    [{}, {"proc/self/cgroup": "nonsense\n"}, {"proc/self/cgroup": "0::/../../away\n"}],
)
def test_an_unreadable_group_gives_no_values(tmp_path, files):
    try:
        assert memory_kills_and_limit(tree(tmp_path, files)) == (0, None)
    except ValueError:
        pytest.fail("a line of another form must not stop an instance")


@pytest.mark.parametrize(
    ("entry", "folder", "text", "seconds"),
    [
        ("0::/job", "job", "nr_throttled 3\nthrottled_usec 2500000\n", 2.5),
        ("0::/job", "", "nr_throttled 3\nthrottled_usec 2500000\n", 2.5),  # of the parent group
        ("4:cpu,cpuacct:/job", "cpu/job", "nr_throttled 3\nthrottled_time 1500000000\n", 1.5),
        ("4:memory:/job", "cpu/job", "throttled_time 1500000000\n", 0.0),
        ("0::/job", "job", "", 0.0),
    ],
)
def test_throttled_time_is_read_from_the_control_group(tmp_path, entry, folder, text, seconds):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(entry + "\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text(text)
    assert throttled_seconds(str(tmp_path)) == seconds


FILLS_MEMORY = """
import os, time
kept = []
while os.environ["RANK"] == "1":
    kept.append(bytearray(b"x" * (1 << 22)))
time.sleep(1000)
"""


@pytest.mark.mpi
def test_a_program_that_exceeds_the_memory_limit_is_killed(tmp_path):
    group = MEMORY_V1 / f"poprun-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(150 << 20))
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        fault = Fault(
            title="",
            code=137,
            before=("sh", "-c", f'echo $$ > {group}/tasks && exec "$@"', "sh"),
            program=(sys.executable, "-c", FILLS_MEMORY),
        )
        seen = measure(fault, tmp_path / "out")
        assert seen.code == 137, seen.stderr
        assert "out of memory: the kernel killed the instance" in seen.stderr
        assert "limit 150 MiB" in seen.stderr
        assert seen.report["first_failure"]["oom_kills"] == 1
    finally:
        group.rmdir()


@pytest.fixture
def processes_group():
    group = PROCESSES_V1 / f"poprun-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group with a limit of processes can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (1, "cannot run .*mpirun: Resource temporarily unavailable: raise the limit of processes"),
        # The limit is reached by mpirun or by a wrapper.
        pytest.param(
            4,
            "the limit of 4 processes and threads was reached: raise the limit of processes",
            marks=pytest.mark.sweep,
        ),
        (7, "the limit of 7 processes and threads was reached: raise the limit of processes"),
    ],
)
def test_a_job_that_may_not_start_more_processes_says_so(tmp_path, processes_group, limit, said):
    (processes_group / "pids.max").write_text(str(limit))
    before = ("sh", "-c", f'echo $$ > {processes_group}/cgroup.procs && exec "$@"', "sh")
    # Programs that end at once might not run at the same time, and so not reach the limit.
    program = (sys.executable, "-c", "import signal; signal.pause()")
    seen = measure(Fault(title="", code=3, before=before, program=program), tmp_path)
    assert seen.code == 3
    assert re.fullmatch(f"poprun-py: error: .*{said}.*\n", seen.stderr), seen.stderr
