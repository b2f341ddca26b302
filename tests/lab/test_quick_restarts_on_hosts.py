"""Jobs of several hosts with --memory-checkpoints: their wrappers and states over a restart."""

from __future__ import annotations

import sys

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(200)]

# Instance 1 of the first attempt or its wrapper is killed when "kill" is there, because a killed
# wrapper loses output that it has not passed on yet. The second attempt ends when "go" is there.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from popdist_py import heartbeat
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
states = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
before = sorted(path.name for path in states.glob("*"))
states.mkdir(mode=0o700, exist_ok=True)
(states / attempt).touch()
heartbeat.step()
print(rank, os.getppid(), states, before, flush=True)
folder = Path(__file__).parent
if attempt == "0":
    while not (folder / "kill").exists():
        time.sleep(0.01)
    if rank == "1":
        os.kill(os.getppid() if sys.argv[1] == "wrapper" else os.getpid(), signal.SIGKILL)
    time.sleep(60)
while not (folder / "go").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["end", "launcher killed"])
@pytest.mark.parametrize("killed", ["program", "wrapper"])
def test_wrappers_of_other_hosts_run_the_next_attempt_and_remove_the_states(
    lab, tmp_path, how, killed
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = lab[0].start(
        *(sys.executable, "-m", "poprun_py", "--host", lab.names(), "--num-instances", "2"),
        *("--output", "plain", "--memory-checkpoints", "--max-restarts", "1", program, killed),
    )
    first = sorted(job.stdout.readline().split(maxsplit=3) for _ in range(2))
    (tmp_path / "kill").touch()
    second = sorted(job.stdout.readline().split(maxsplit=3) for _ in range(2))
    assert all(len(line) == 4 for line in first + second), job.communicate()
    same = [before[1] == after[1] for before, after in zip(first, second, strict=True)]
    assert same == [True, killed == "program"]  # the keeper of a killed wrapper replaces it
    assert [line[3] for line in second] == ["['0']\n"] * 2
    folder = second[0][2]
    assert all(has(host, folder) for host in lab.hosts)
    assert len(lab[1].run("ls", "/dev/shm/poprun-py-leases").stdout.split()) == 1
    if how == "end":
        (tmp_path / "go").touch()
    else:
        launcher = lab[0].run("pgrep", "-f", "m poprun_py --host").stdout.split()
        lab[0].run("kill", "-KILL", *launcher)
    job.communicate(timeout=60)
    wait_until(lambda: not any(has(host, folder) for host in lab.hosts), 30)


def has(host, folder):
    return host.run("test", "-d", folder).returncode == 0


WAITS = """
import os, time
from pathlib import Path
states = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
states.mkdir(mode=0o700, exist_ok=True)
print(states, flush=True)
while not Path(__file__).with_name("go").exists():
    time.sleep(0.01)
"""


def test_programs_go_on_without_the_daemon_of_a_host(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    job = lab[0].start(
        *(sys.executable, "-m", "poprun_py", "--host", lab.names(), "--num-instances", "2"),
        *("--output", "plain", "--memory-checkpoints", "--max-restarts", "1", program),
    )
    folders = {job.stdout.readline().strip() for _ in range(2)}
    lab[1].run("kill", "-KILL", *lab[1].run("pgrep", "-x", "prted").stdout.split())
    wait_until(lambda: not lab[0].run("pgrep", "-x", "mpirun|prterun").stdout, 30)
    (tmp_path / "go").touch()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    assert "restart" not in stderr
    wait_until(lambda: not any(has(host, *folders) for host in lab.hosts), 10)
    wait_until(lambda: not any(host.processes("start_wrapper.py") for host in lab.hosts), 10)
