"""The main job as a user types it, and how a job ends when something is wrong."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

pytestmark = pytest.mark.mpi

TWO = ("--num-instances", "2", "--num-replicas", "8")
TRAIN = ROOT / "examples" / "train.py"
# As the README shows them; the other commands of the documents are run by tests/repository.
MAIN_JOBS = (
    "poprun-py --num-instances 2 --num-replicas 8 --print-topology yes examples/train.py",
    "python examples/train.py --replicas 4",
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("epochs", "at_least"), [(4, 90), pytest.param(10, 95, marks=pytest.mark.sweep)]
)
def test_main_job_prints_table_bar_and_accuracy(poprun, golden, request, epochs, at_least):
    """The whole job is started as the README shows it, the shorter one in a process with torch."""
    words = [TRAIN] if epochs == 10 else [*request.getfixturevalue("warm"), TRAIN, "--epochs", "4"]
    done = poprun(*TWO, "--print-topology", "yes", *words, timeout=220)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    golden("main_job_table.txt", "\n".join(lines[:11]) + "\n")
    match = re.fullmatch(r"\[1,0\]<stdout>:test accuracy (\d+\.\d) %", lines[-1])
    assert match, lines[-1]
    assert float(match[1]) >= at_least
    last = rf"\[1,0\]<stderr>:epoch {epochs}/{epochs}: 100%.*accuracy=.*loss="
    assert re.search(last, done.stderr)
    # In a pipe, one tag a line, and units that mean something.
    bars = [line for line in done.stderr.splitlines() if "%|" in line]
    assert len(bars) > 3
    assert all(line.count("[1,0]<stderr>:") == 1 for line in bars)
    count = f"{45 * epochs}/{45 * epochs}"
    assert re.search(rf"\| {count} steps \[[0-9:<]+, [1-9]\d+ samples/s, accuracy=", bars[-2])
    assert not re.search(r"it/s|%/s", done.stderr)
    assert "\r" not in done.stderr
    assert "[1,1]<stderr>:epoch" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(240)
def test_main_job_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, TRAIN, "--replicas", "4"],
        capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True,
        # Two threads would wait for one another where other tests have the cores.
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    match = re.fullmatch(r"test accuracy (\d+\.\d) %", done.stdout.splitlines()[-1])
    assert match
    assert float(match[1]) >= 95


def test_readme_shows_these_two_jobs():
    shown = (ROOT / "README.md").read_text()
    for words in MAIN_JOBS:
        assert f"\n$ {words}\n" in shown


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_every_missing_data_set_is_explained(monkeypatch, capsys, name):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train")
    with pytest.raises(SystemExit, match="2"):
        example.load(name, Path("nowhere"))
    assert f"no {name} data in nowhere: expected" in capsys.readouterr().err


def test_exit_code_is_the_instances_own(poprun, script):
    """Its siblings wait in a barrier: a job that did not end them would not return at all."""
    program = script(
        "import os, popdist_py\n"
        "popdist_py.init()\n"
        "if popdist_py.getInstanceIndex() == 1: os._exit(7)\n"
        "popdist_py.barrier()\n"
    )
    done = poprun(*TWO, program)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert "instance 1 (replicas 4-7)" in done.stderr


def test_failure_without_the_library(poprun):
    done = poprun(*TWO, "sh", "-c", "if [ $RANK = 0 ]; then exit 3; fi; sleep 30")
    assert done.returncode == 3


def test_uneven_split_is_one_line(poprun):
    done = poprun("--num-instances", "3", "--num-replicas", "8", "true")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "8" in done.stderr
    assert "3" in done.stderr


@pytest.mark.parametrize("program", ["no-such-program", "./missing", "missing.py", "/dev/null"])
def test_missing_program_is_one_line(look, program):
    done = look(*TWO, program)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert program in done.stderr


def test_program_that_turns_out_not_to_be_executable(poprun, tmp_path):
    program = tmp_path / "program"
    program.write_text("no interpreter line\n")
    program.chmod(0o755)
    done = poprun(*TWO, program)
    assert done.returncode == 3
    assert "Exec format error" in done.stderr


def test_every_instance_gets_the_wire(poprun):
    names = """
        POPDIST_NUM_TOTAL_REPLICAS POPDIST_NUM_LOCAL_REPLICAS POPDIST_REPLICA_INDEX_OFFSET
        OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK
        OMPI_COMM_WORLD_LOCAL_SIZE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR
    """
    names = names.split()
    done = poprun(*TWO, "sh", "-c", "echo " + " ".join(f"${name}" for name in names))
    assert sorted(done.stdout.splitlines()) == [
        "[1,0]<stdout>:8 4 0 0 2 0 2 0 2 0 2 127.0.0.1",
        "[1,1]<stdout>:8 4 4 1 2 1 2 1 2 1 2 127.0.0.1",
    ]


def test_jobs_side_by_side_use_different_ports(poprun):
    jobs = [
        poprun(*TWO, "sh", "-c", "echo $MASTER_PORT; cat", start=True, stdin=subprocess.PIPE,
               env={"POPRUN_LEASES": "none"})
        for _ in range(2)
    ]  # fmt: skip
    ports = [{job.stdout.readline().partition(">:")[2] for _ in range(2)} for job in jobs]
    for job in jobs:
        job.communicate("", timeout=60)
    assert [len(own) for own in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_ddp_over_gloo_runs_unchanged(poprun, script, warm):
    program = script(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "model(torch.full((1, 1), 1.0 + dist.get_rank())).backward()\n"
        "print('gradient', model.module.weight.grad.item(), 'local', os.environ['LOCAL_RANK'])\n"
        "dist.destroy_process_group()\n"
    )
    done = poprun(*TWO, *warm, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[1,0]<stdout>:gradient 1.5 local 0",
        "[1,1]<stdout>:gradient 1.5 local 1",
    ]


def test_mpi4py_program_runs_unchanged(poprun, script):
    program = script(
        "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))\n"
    )
    done = poprun(*TWO, program)
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:3", "[1,1]<stdout>:3"]
