"""What the kernel says of a job's bindings is shown, and a thread count of the user's is heard."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.mpi
JOB = ("--num-instances", "2", "--num-replicas", "2")


@pytest.mark.parametrize("form", ["tree", "cores"])
def test_tree_of_a_running_job_shows_what_the_kernel_says(poprun, form):
    # The programs end when both lines are here, and not before somebody has read.
    job = poprun(*JOB, "--print-topology", form, "sleep", "50", start=True)
    line = re.compile(r"instance (\d) has PID \d+: CPUs? \S+, memory policy \w+")
    found = []
    for text in job.stdout:
        found += line.findall(text)
        if len(found) == 2:
            job.terminate()
    assert sorted(found) == ["0", "1"]


def test_table_of_a_running_job_does_not(poprun):
    assert "has PID" not in poprun(*JOB, "--print-topology", "yes", "true").stdout


def test_too_many_threads_of_the_user_are_warned_of(poprun):
    done = poprun(*JOB, "sh", "-c", "echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "500"})
    assert "1000 compute threads on" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:500", "[1,1]<stdout>:500"]


def test_variable_of_one_instance_does_not_reach_the_other(poprun, tmp_path):
    from dataclasses import replace

    from poprun_py.planning.cpu_placement import Placement
    from poprun_py.planning.instance_variables import placement_variables

    some = Placement(numa_nodes=(0,), memory_nodes=(0,), cpus=(0,), threads=3)
    none = replace(some, numa_nodes=(), memory_nodes=(), cpus=(), threads=0)
    first, second = placement_variables([some, none], set())
    assert dict(first)["POPRUN_CPUS"] == "0"
    assert dict(second) == dict.fromkeys(dict(first), "")
    done = poprun(
        *JOB, "--instance-mpi-local-args", "0:-x OMP_NUM_THREADS=7",
        "--instance-mpi-local-args", "1:-x OMP_NUM_THREADS=", "sh", "-c",
        "echo ${OMP_NUM_THREADS-unset}",
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:7", "[1,1]<stdout>:unset"]
