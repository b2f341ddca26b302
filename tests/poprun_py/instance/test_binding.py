"""Binding of real processes to CPUs and memory, as the kernel reports it afterwards."""

import json
import os
import platform
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py.display.formatting import ranges_text
from poprun_py.instance import binding
from poprun_py.planning.binding_check import binding_differences
from poprun_py.planning.cpu_placement import Placement

REFUSE = ROOT / "tests" / "support" / "refused_calls.py"
CPUS = sorted(os.sched_getaffinity(0))


def in_child(code: str, *, before: tuple[str, ...] = (), **environ: str):
    """Run ``code`` in a new interpreter that has imported ``binding``; return its JSON output."""
    done = subprocess.run(
        [*before, sys.executable, "-I", "-S", "-c", "import sys, json, os\n"
         f"sys.path.insert(0, {str(ROOT)!r})\nfrom poprun_py.instance import binding\n{code}"],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_binding_holds_for_a_process_and_its_children():
    own, child = in_child(
        f"binding.apply([{CPUS[-1]}], [0])\n"
        "import subprocess\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "found = [binding.read_back(pid) for pid in (os.getpid(), child.pid)]\n"
        "print(json.dumps(found))\n"
        "child.communicate()",
        OMP_NUM_THREADS="3",
        MKL_NUM_THREADS="2",
    )
    for found in (own, child):
        assert found["cpus"] == [CPUS[-1]]
        assert (found["memory_policy"], found["memory_nodes"]) == ("bind", [0])
        assert found["omp_num_threads"] == 3
        assert found["other_threads"] == {"MKL_NUM_THREADS": "2"}
        assert not found["ended"]
    assert binding_differences(Placement((), (0,), (CPUS[-1],), 3), child) == []


def test_an_empty_request_changes_nothing():
    found = in_child("binding.apply([], []); print(json.dumps(binding.read_back(os.getpid())))")
    assert found["cpus"] == CPUS
    assert found["memory_policy"] == "default"


def test_refusals_are_reported_and_the_program_runs():
    found = in_child(
        "binding.apply([4000], [1000]); print(json.dumps(binding.read_back(os.getpid())))"
    )
    assert binding_differences(Placement((), (1000,), (4000,), 0), found) == [
        f"runs on CPUs {ranges_text(CPUS)} instead of CPU 4000",
        "has the memory policy default instead of the memory policy bind on NUMA node 1000",
    ]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="filter not written")
@pytest.mark.parametrize(
    ("forbidden", "policy"), [("set_mempolicy=2", "preferred"), ("set_mempolicy", "default")]
)
def test_a_weaker_memory_policy_is_used_if_a_container_forbids_the_first(forbidden, policy):
    found = in_child(
        "binding.apply([], [0]); print(json.dumps(binding.read_back(os.getpid())))",
        before=(sys.executable, str(REFUSE), forbidden),
    )
    assert found["memory_policy"] == policy
    (difference,) = binding_differences(Placement((), (0,), (), 0), found)
    assert difference.endswith("instead of the memory policy bind on NUMA node 0")


def test_an_ended_process_has_no_differences():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    found = binding.read_back(child)
    os.waitpid(child, 0)
    assert found["ended"]
    assert binding_differences(Placement((), (7,), (4000,), 9), found) == []
    assert binding.read_back(child)["ended"]


def test_a_program_can_be_read_right_after_its_start():
    # The environment becomes visible a moment after exec. Many attempts meet that moment.
    unset = 0
    for _ in range(60):
        with subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, env={"OMP_NUM_THREADS": "2"}
        ) as child:
            unset += binding.read_back(child.pid)["omp_num_threads"] != 2
    assert unset == 0


def test_differences_name_the_actual_and_the_planned_binding():
    plan = Placement((), (0, 1), (1, 2, 3), 3)
    found = {
        "cpus": [1], "memory_policy": "preferred", "memory_nodes": [0], "omp_num_threads": 0,
    }  # fmt: skip
    assert binding_differences(plan, found) == [
        "runs on CPU 1 instead of CPUs 1-3",
        "has the memory policy preferred on NUMA node 0 instead of the memory policy bind on "
        "NUMA nodes 0-1",
        "runs with OMP_NUM_THREADS not set instead of 3",
    ]
    unknown = {"cpus": None, "memory_policy": None, "memory_nodes": [], "omp_num_threads": None}
    assert binding_differences(plan, unknown) == [
        "runs on unknown CPUs instead of CPUs 1-3",
        "has an unreadable memory policy instead of the memory policy bind on NUMA nodes 0-1",
    ]
    assert binding_differences(Placement((), (), (), 0), found) == []


@pytest.mark.parametrize(
    ("line", "policy", "nodes"),
    [
        ("default file=/bin/x", "default", []),
        ("bind:0-1 file=/bin/x", "bind", [0, 1]),
        ("bind=static:2 anon=1", "bind", [2]),
        ("prefer:3", "preferred", [3]),
        ("prefer (many):0,2 anon=1", "preferred", [0, 2]),
        ("interleave:0-3 anon=1", "interleave", [0, 1, 2, 3]),
        ("weighted interleave:0-1 anon=1", "weighted interleave", [0, 1]),
        ("local anon=1", "local", []),
    ],
)
def test_memory_policies_are_parsed_as_kernels_write_them(monkeypatch, line, policy, nodes):
    text = f"55a2d6bb0000 {line} mapped=2\n55a2d6bb2000 default\n".encode()
    monkeypatch.setattr(binding, "read_file", lambda *_, **__: text)
    assert binding._memory_policy(1) == (policy, nodes)


def test_importing_binding_loads_few_modules():
    code = (
        "import sys, os\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "before = set(sys.modules)\n"
        "from poprun_py.instance import binding\n"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert "poprun_py.instance.binding" in done.stdout.split()
    assert set(done.stdout.split()) <= {
        "poprun_py", "poprun_py.instance", "poprun_py.instance.binding", "poprun_py.process_info",
        "time", "__future__",
    }  # fmt: skip
