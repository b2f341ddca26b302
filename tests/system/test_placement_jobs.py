"""Real jobs on this machine: what is planned is what the kernel shows, and a difference is told."""

import json
import os
import platform
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py.machines.machine import parse_cpu_list

REFUSE = ROOT / "tests" / "support" / "refused_calls.py"
CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(len(CPUS) < 2, reason="two instances need two CPUs"),
]
seccomp = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter")

SHOW = """
import json, os
from pathlib import Path
status = Path("/proc/self/status").read_text()
cpus = next(l for l in status.splitlines() if l.startswith("Cpus_allowed_list")).split()[1]
print(json.dumps([int(os.environ["RANK"]), cpus, os.environ.get("OMP_NUM_THREADS")]))
"""


def seen(stdout: str) -> list[list]:
    """Return what the instances printed, in their order."""
    return sorted(json.loads(line.partition(">:")[2]) for line in stdout.splitlines())


def test_instances_run_on_disjoint_cpus_of_the_plan(poprun, script, tmp_path):
    done = poprun(
        "--num-instances", 2, "--num-replicas", 2, "--strict-binding",
        "--export-plan", tmp_path / "plan.json", "--run", sys.executable, script(SHOW),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planned = json.loads((tmp_path / "plan.json").read_text())["instances"]
    found = seen(done.stdout)
    assert [list(parse_cpu_list(cpus)) for _, cpus, _ in found] == [i["cpus"] for i in planned]
    assert [threads for _, _, threads in found] == [str(i["threads"]) for i in planned]
    assert not set(planned[0]["cpus"]) & set(planned[1]["cpus"])


def test_threads_that_the_user_set_stay(poprun, script):
    done = poprun(
        "-v", "--num-instances", 2, "--num-replicas", 2, "--strict-binding", sys.executable,
        script(SHOW), env={"OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [threads for _, _, threads in seen(done.stdout)] == ["3", "3"]
    assert re.search("instance 0 has PID .*, OMP_NUM_THREADS 3$", done.stderr, re.MULTILINE)


@pytest.mark.sweep
@pytest.mark.parametrize("threads", [None, 1])
def test_torch_takes_its_threads_from_the_plan_or_the_user(poprun, script, threads):
    program = script("import torch; print([0, torch.get_num_threads()])")
    words = () if threads is None else ("--env", f"OMP_NUM_THREADS={threads}")
    done = poprun("-n", 1, *words, sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert seen(done.stdout) == [[0, threads or len(CPUS)]]


def test_more_instances_than_cpus_are_refused_or_warned_of(poprun, look, script):
    count = len(CPUS) + 1
    words = ("--num-instances", count, "--num-replicas", count)
    refused = look(*words, sys.executable, script(SHOW))
    assert refused.returncode == 2
    assert f"{count} instances are planned on a host with {len(CPUS)} usable CPUs" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = poprun(*words, "--oversubscribe", sys.executable, script(SHOW))
    assert done.returncode == 0, done.stderr
    assert len(seen(done.stdout)) == count
    assert f"{count} instances share {len(CPUS)} CPUs" in done.stderr


def test_an_unknown_mode_names_the_nearest(look):
    done = look("--process-placement", "spreadnum", "true")
    assert done.returncode == 2
    assert "spreadnuma" in done.stderr


def refusing_affinity(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, REFUSE, "sched_setaffinity", sys.executable, "-m", "poprun_py", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


@seccomp
def test_another_binding_than_planned_is_a_warning(script, tmp_path):
    told = tmp_path / "told"
    # The binding of a program that has ended cannot be read.
    stays = f"import time\nwhile not Path({str(told)!r}).exists(): time.sleep(0.01)\n"
    words = ("--num-instances", "2", "--num-replicas", "2")
    with refusing_affinity(*words, sys.executable, str(script(SHOW + stays))) as job:
        warnings = [job.stderr.readline() for _ in CPUS[:2]]
        told.touch()
        stdout, rest = job.communicate(timeout=60)
    assert job.returncode == 0, rest
    assert len(seen(stdout)) == 2
    assert f"instance 0 runs on CPUs {CPUS[0]}-{CPUS[-1]} instead of CPU {CPUS[0]}" in warnings[0]


@seccomp
def test_strict_binding_makes_it_an_error(script):
    words = ("--num-instances", "2", "--num-replicas", "2", "--strict-binding")
    slow = str(script("import time; time.sleep(40)"))
    with refusing_affinity(*words, sys.executable, slow) as job:
        _, stderr = job.communicate(timeout=100)
    assert job.returncode == 3, stderr
    assert "--strict-binding" in stderr
    assert "Traceback" not in stderr
