"""What a job listens on while it runs, read back from the kernel."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.mpi

# Instance 0 looks at all processes of its job when every instance has started MPI.
PROGRAM = """
import os, psutil
{start}
def line(where, connection):
    return f"listens {{where.name()}} {{connection.laddr.ip}}"
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 0:
    launcher = psutil.Process(int(os.environ['LAUNCHER']))
    for each in [launcher, *launcher.children(recursive=True)]:
        for connection in each.net_connections("inet"):
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                print(line(each, connection), flush=True)
MPI.COMM_WORLD.barrier()
"""
JOB = ("--num-instances", "2", "--num-replicas", "2")
STARTS = {
    "popdist": "import popdist_py; popdist_py.init(); from mpi4py import MPI",
    "mpi4py": "from mpi4py import MPI",
    "explicit": "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; MPI.Init_thread()",
}


def listening(tmp_path, start: str, *options: str) -> list[str]:
    """Run a job of two instances and return which process listens at which address."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(start=STARTS[start]), encoding="utf-8")
    launch = (
        "import os; os.environ['LAUNCHER'] = str(os.getpid()); "
        "import runpy; runpy.run_module('poprun_py', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", launch, *JOB, *options, "--env", "LAUNCHER", str(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    found = [
        line.partition("listens ")[2] for line in ended.stdout.splitlines() if "listens" in line
    ]
    assert found
    return found


@pytest.mark.parametrize(
    "start",
    ["popdist", *(pytest.param(s, marks=pytest.mark.sweep) for s in ("mpi4py", "explicit"))],
)
def test_a_job_on_one_host_listens_on_loopback_alone(tmp_path, start):
    found = listening(tmp_path, start)
    assert {line.split()[-1] for line in found} <= {"127.0.0.1", "::1"}
    assert any(line.startswith("prterun") for line in found)
    assert any(line.startswith("python") for line in found)


@pytest.mark.sweep
def test_processes_that_are_started_later_are_reached_over_loopback(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys
            from mpi4py import MPI
            parent = MPI.Comm.Get_parent()
            if parent == MPI.COMM_NULL:
                if MPI.COMM_WORLD.rank == 0:
                    child = MPI.COMM_SELF.Spawn(sys.executable, [__file__], maxprocs=1)
                    print("from the child:", child.recv(source=0), flush=True)
                    child.Disconnect()
                MPI.COMM_WORLD.barrier()
            else:
                parent.send(b"x" * 100_000 and "hello", 0)
                parent.Disconnect()
            """
        ),
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, "-m", "poprun_py", *JOB, str(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "from the child: hello" in ended.stdout


def test_without_shared_memory_messages_go_over_loopback(tmp_path):
    found = listening(tmp_path, "mpi4py", "--mpi-global-args", "--mca btl self,tcp")
    assert {line.split()[-1] for line in found} <= {"127.0.0.1", "::1"}
