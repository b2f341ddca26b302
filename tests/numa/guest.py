"""Runs in the emulated machine: starts jobs through poprun-py and prints what their instances saw.

``guest.py TOPOLOGY``: one line of JSON for each case of that topology that is not long.
``guest.py TOPOLOGY long``: the same for the long ones. Judged in test_numa.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARK = "numa-case "
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Case:
    """A job: options of the launcher, and for each instance its CPUs, memory nodes and threads.

    ``expected`` is what was worked out by hand from the topology, not what the planner says.
    ``forbid`` makes the kernel refuse memory policies; ``limits`` are files of a control group that
    the launcher runs in. Long cases bind what the others bind, by another plan: CI leaves them out.
    """

    options: tuple[str, ...]
    expected: tuple[tuple[str, str, int], ...]
    forbid: str | None = None
    limits: tuple[tuple[str, str], ...] = ()
    is_long: bool = False


STRICT = "--strict-binding"
CASES: dict[str, dict[str, Case]] = {
    "4node": {
        "an instance on each node": Case(
            ("--num-instances=4", STRICT),
            (("0-1", "0", 2), ("2-3", "1", 2), ("4-5", "2", 2), ("6-7", "3", 2)),
        ),
        "nodes that instances do not divide": Case(
            ("--num-instances=3", STRICT), (("0-3", "0-1", 4), ("4-5", "2", 2), ("6-7", "3", 2))
        ),
        "round robin": Case(
            ("--num-instances=5", "--numa-aware=yes", STRICT),
            (("0-1", "0", 1), ("2-3", "1", 2), ("4-5", "2", 2), ("6-7", "3", 2), ("0-1", "0", 1)),
            is_long=True,
        ),
        "packed": Case(
            ("--num-instances=3", "--process-placement=packnuma", "--cores-per-instance=1", STRICT),
            (("0", "0", 1), ("1", "0", 1), ("2", "1", 1)),
            is_long=True,
        ),
        "nothing bound": Case(
            ("--num-instances=2", "--process-placement=disabled", STRICT),
            (("0-7", "", 4), ("0-7", "", 4)),
        ),
        "memory policy forbidden": Case(
            ("--num-instances=2",), (("0-3", "", 4), ("4-7", "", 4)), forbid="set_mempolicy"
        ),
    },
    "2node-smt": {
        "an instance on each node": Case(
            ("--num-instances=2", STRICT), (("0-3", "0", 2), ("4-7", "1", 2)), is_long=True
        ),
        "siblings together, a thread on each": Case(
            ("--num-instances=4", "--smt=yes", STRICT),
            (("0-1", "0", 2), ("2-3", "0", 2), ("4-5", "1", 2), ("6-7", "1", 2)),
        ),
        "reserved cores": Case(
            ("--num-instances=2", "--reserve-cores=1", STRICT),
            (("0-3", "0", 1), ("4-7", "1", 1)),
            is_long=True,
        ),
    },
    "asym": {
        "an instance on each node": Case(
            ("--num-instances=2", STRICT), (("0-3", "0", 4), ("4-5", "1", 2)), is_long=True
        ),
        "nodes share by cores": Case(
            ("--num-instances=3", STRICT),
            (("0-1", "0", 2), ("2-3", "0", 2), ("4-5", "1", 2)),
            is_long=True,
        ),
        "even cores": Case(
            ("--num-instances=2", "--process-placement=spreadcores", STRICT),
            (("0-2", "0", 3), ("3-5", "0-1", 3)),
        ),
    },
    "memonly": {
        "memory goes to the nearest node": Case(
            ("--num-instances=2", STRICT), (("0-1", "0", 2), ("2-3", "1-2", 2))
        ),
        "within a control group": Case(
            ("--num-instances=2", STRICT),
            (("1", "0", 1), ("2-3", "1", 1)),
            limits=(
                ("cpuset.cpus", "1-3"),
                ("cpuset.mems", "0-1"),
                ("cpu.max", "290000 100000"),
            ),
        ),
    },
}


def run(case: Case) -> dict[str, object]:
    """Start the job and return the plan, the exit code, the log and what each instance saw."""
    with tempfile.TemporaryDirectory() as folder:
        plan, seen = Path(folder, "plan.json"), Path(folder, "seen")
        seen.mkdir()
        forbid = [sys.executable, str(HERE.parent / "support" / "refused_calls.py"), case.forbid]
        command = [
            *(forbid if case.forbid else []),
            *(sys.executable, "-m", "poprun_py", f"--num-replicas={len(case.expected) or 2}", "-v"),
            *(*case.options, "--export-plan", str(plan), "--run"),
            *(sys.executable, str(HERE / "probe.py"), str(seen)),
        ]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
            preexec_fn=_entering(case.limits),
        )  # fmt: skip
        return {
            "exit_code": done.returncode,
            "log": done.stderr,
            "plan": json.loads(plan.read_text()) if plan.exists() else None,
            "seen": [
                json.loads(file.read_text()) if file.exists() else None
                for file in (seen / f"{i}.json" for i in range(len(case.expected)))
            ],
        }


def _entering(limits: tuple[tuple[str, str], ...]):
    """Return what moves a new process into a control group with these limits."""
    if not limits:
        return None
    group = _CGROUP / "limited"
    group.mkdir(exist_ok=True)
    (_CGROUP / "cgroup.subtree_control").write_text("+cpu +cpuset")
    for name, value in limits:
        (group / name).write_text(value)
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    topology, are_long = sys.argv[1], sys.argv[2:] == ["long"]
    for name, case in CASES[topology].items():
        if case.is_long != are_long:
            continue
        print(f"{MARK}{json.dumps({'name': name, **run(case)})}", flush=True)


if __name__ == "__main__":
    main()
