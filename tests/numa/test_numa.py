"""Placement end to end on a real Linux kernel with several NUMA nodes, in an emulated machine.

Some 30 to 80 seconds for a machine: run by ``make test-numa``, where qemu is installed.
"""

import faulthandler
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from numa.guest import CASES, MARK, STRICT

HERE = Path(__file__).parent
VM = HERE / "numa-vm"
BOOT_SECONDS = 400

pytestmark = [pytest.mark.numa, pytest.mark.timeout(BOOT_SECONDS + 60)]


@cache
def missing() -> str:
    """Return what this machine lacks to boot another one, or nothing."""
    done = subprocess.run([VM, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 77), done.stderr
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@cache
def results(topology: str, are_long: bool) -> dict[str, dict]:
    """Boot the machine, run its long cases or the others, and return their reports by name."""
    faulthandler.cancel_dump_traceback_later()  # a boot is slow, not stuck
    script = HERE / "guest.py"
    words = f"{topology} long" if are_long else topology
    text = f"cd {HERE.parents[1]} && exec {sys.executable} {script} {words}\n"
    # The guest sees this file system; the script itself travels inside the machine's image.
    done = subprocess.run(
        [VM, "-t", str(BOOT_SECONDS), "/dev/stdin", topology],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    reports = [
        json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)
    ]
    return {report["name"]: report for report in reports}


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        pytest.param(topology, name, marks=[pytest.mark.long] if case.is_long else [])
        for topology in CASES
        for name, case in CASES[topology].items()
    ],
)
def test_instances_run_where_the_plan_says(topology, name):
    if missing():
        pytest.skip(missing())
    case = CASES[topology][name]
    report = results(topology, case.is_long)[name]
    assert report["exit_code"] == 0, report["log"]
    planned = [
        (_listed(i["cpus"]), _listed(i["memory_nodes"]), i["threads"])
        for i in report["plan"]["instances"]
    ]
    for expected, plan, seen in zip(case.expected, planned, report["seen"], strict=True):
        cpus, memory, threads = expected
        assert plan[2] == threads
        # An instance that is not bound has no CPUs in the plan.
        assert plan[0] == ("" if "--process-placement=disabled" in case.options else cpus)
        assert seen["cpus"] == cpus
        assert seen["omp_num_threads"] == str(threads)
        # The probe reports no threads where torch brings no OpenMP library.
        assert seen["threads"] in (threads, None)
        allocation = seen["allocation"]
        assert allocation["policy"] == (f"bind:{memory}" if memory else "default")
        if memory:
            assert plan[1] == memory
            assert set(allocation["nodes"]) <= set(_numbers(memory))
        assert allocation["pages"] > 0
    if case.forbid:
        assert (
            "the memory policy default instead of the memory policy bind on NUMA nodes 0-1"
        ) in report["log"]
    elif STRICT in case.options:
        assert "instead of" not in report["log"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("/dev/null", "5node"),
            "topology '5node': expected one of 4node, 2node-smt, asym, memonly",
        ),
        (("/no/such/script",), "usage: numa-vm"),
        ((), "usage: numa-vm"),
    ],
)
def test_the_machine_refuses_what_it_does_not_know(words, message):
    done = subprocess.run([VM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_cases_cover_every_machine():
    done = subprocess.run([VM, "--list"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(CASES)


# The first machine hangs, and the second one runs the script at once.
FAKE_QEMU = """#!/bin/bash
for word; do case $word in file:*/output) output=${word#file:};; esac; done
if mkdir "$(dirname "$0")/hung" 2>/dev/null; then exec sleep 100; fi
printf '%s\\n' numa-vm-begins hello 'numa-vm-exit 7' > "$output"
"""


def test_a_machine_that_hangs_at_its_boot_is_started_again(tmp_path):
    if missing():
        pytest.skip(missing())
    qemu = tmp_path / "qemu-system-x86_64"
    qemu.write_text(FAKE_QEMU)
    qemu.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NUMA_VM_BOOT_SECONDS": "1"}
    done = subprocess.run(
        [VM, "/dev/stdin"], input="exit 7", env={**os.environ, **environ}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "hello\n")
    assert done.stderr == "numa-vm: boot 1 of 3 did not reach /init (qemu ended with 143)\n"


def _numbers(text: str) -> list[int]:
    parts = (part.split("-") for part in text.split(","))
    return [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]


def _listed(numbers: list[int]) -> str:
    """Return contiguous numbers as the kernel writes them."""
    if not numbers:
        return ""
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
