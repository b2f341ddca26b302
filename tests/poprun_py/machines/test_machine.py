"""Machines are read from trees of kernel files, from saved JSON and from this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.machines import machines
from support.launcher.sysfs_trees import GIB, SNAPSHOTS, TREES, Thread, Tree, regular, snapshot

from poprun_py.display.formatting import ranges_text
from poprun_py.machines.machine import (
    HardwareError,
    Machine,
    NumaNode,
    load_machines,
    parse_cpu_list,
)
from poprun_py.machines.machine_reader import read_machine


@pytest.mark.parametrize("name", TREES)
def test_machine_read_from_tree_is_the_stored_snapshot(name, tmp_path, request):
    machine = read_machine(TREES[name].write(tmp_path))
    text = json.dumps(machine.to_json(), indent=1) + "\n"
    if request.config.getoption("--rewrite-goldens"):
        (SNAPSHOTS / f"{name}.json").write_text(text)
    assert (SNAPSHOTS / f"{name}.json").read_text() == text
    assert snapshot(name) == machine


def test_every_snapshot_has_its_tree():
    assert {path.stem for path in SNAPSHOTS.glob("*.json")} == set(TREES)


def test_a_large_machine():
    machine = snapshot("epyc-nps4")
    assert len(machine.cores) == 128
    assert len(machine.allowed_cpus) == 256
    assert [len(node.cpus) for node in machine.numa_nodes] == [32] * 8
    assert len({core.l3 for core in machine.cores}) == 16
    assert {core.package for core in machine.cores} == {0, 1}
    assert machine.cores[0].cpus == (0, 128)
    assert machine.numa_nodes[3].distances == (12, 12, 12, 10, 32, 32, 32, 32)


def test_efficiency_classes_of_hybrid_machines():
    assert [core.efficiency for core in snapshot("hybrid").cores] == [1] * 8 + [0] * 16
    # The capacities 871, 868 and 865 are one class: equal cores may differ by a few percent.
    assert [core.efficiency for core in snapshot("big-little").cores] == [0] * 4 + [1] * 3 + [2]


def test_offline_cpus_are_left_out():
    machine = snapshot("offline-cpus")
    assert machine.allowed_cpus == frozenset(range(16)) - {3, 8, 9, 15}
    assert sorted(core.cpus for core in machine.cores if len(core.cpus) == 1) == [
        (0,),
        (1,),
        (7,),
        (11,),
    ]


@pytest.mark.parametrize(
    ("name", "quota", "whole"),
    [("one-node", None, None), ("quota-container", 6.5, 6), ("quota-container-v1", 0.5, 1)],
)
def test_the_lowest_cpu_quota_counts_and_is_rounded_down_to_at_least_one(name, quota, whole):
    machine = snapshot(name)
    assert machine.cpu_quota == quota
    assert machine.quota_cpus == whole


def test_cpuset_limits_cpus_and_memory():
    machine = snapshot("cpuset-container")
    assert machine.allowed_cpus == frozenset([*range(8), *range(32, 40), 16, 17])
    assert machine.allowed_memory_nodes == {0}
    assert [core.cpus for core in machine.usable_cores][-2:] == [(16,), (17,)]


def test_the_affinity_of_the_process_narrows(tmp_path):
    root = TREES["one-node"].write(tmp_path)
    status = root / "proc/self/status"
    status.write_text("Cpus_allowed_list:\t2-3,99\n")
    assert read_machine(root).allowed_cpus == {2, 3}
    status.write_text("Cpus_allowed_list:\t99\n")
    with pytest.raises(HardwareError, match=r"none of the online CPUs 0-15 may be used"):
        read_machine(root)


@pytest.mark.parametrize(
    "missing",
    [
        "sys/devices/system/node",
        "sys/devices/system/cpu/online",
        "sys/fs",
        "proc",
        "sys/devices/system/node/node0/meminfo",
        "sys/devices/system/node/node1/distance",
        "sys/devices/system/node/node1/cpulist",
        "sys/devices/system/cpu/cpu1/topology",
        "sys/devices/system/cpu/cpu0/cache",
        "sys/devices/system/cpu/cpu2/cache",
    ],
)
def test_a_machine_is_read_even_if_some_file_is_missing(missing, tmp_path):
    tree = Tree(
        regular(packages=2, nodes=1, cores=4, smt=1, l3=4), {0: GIB, 1: GIB}, without=(missing,)
    )
    machine = read_machine(tree.write(tmp_path))
    assert machine.allowed_cpus == frozenset(range(8))
    assert sorted(cpu for node in machine.numa_nodes for cpu in node.cpus) == list(range(8))
    assert Machine.from_json(machine.to_json()) == machine


@given(data=st.data())
def test_damaged_files_raise_only_hardware_errors(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("damaged")
    TREES["bare" if data.draw(st.booleans()) else "sparse"].write(root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), max_size=6, unique=True)):
        path.write_bytes(
            data.draw(st.sampled_from([b"", b"-1", b"\xff\xfe", b"9-1", b"max", b"0-", b"7"]))
        )
    try:
        machine = read_machine(root)
    except HardwareError:
        return
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: ² kB"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: " + "9" * 5000 + " kB"),
        ("sys/devices/system/node/node0/distance", "-10"),
        ("sys/devices/system/node/node0/distance", "9" * 5000),
        ("sys/fs/cgroup/cpu.max", "9" * 400 + " 1"),
        ("sys/devices/system/cpu/cpu0/topology/physical_package_id", "9" * 400),
    ],
)
def test_invalid_numbers_are_ignored(name, text, tmp_path):
    files = {"sys/devices/system/cpu/online": "0", "sys/devices/system/node/node0/cpulist": "0"}
    for path, content in {**files, name: text}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    machine = read_machine(tmp_path)
    node = NumaNode(index=0, cpus=(0,), memory_bytes=0, distances=(10,))
    assert (machine.numa_nodes, machine.cores[0].package) == ((node,), 0)
    assert machine.cpu_quota is None


def test_core_numbers_replace_missing_lists_of_siblings(tmp_path):
    root = TREES["two-socket-smt"].write(tmp_path)
    expected = read_machine(root)
    for name in (
        "core_cpus_list",
        "thread_siblings_list",
        "package_cpus_list",
        "core_siblings_list",
    ):
        for path in root.rglob(name):
            path.unlink()
    for path in root.rglob("level"):
        path.unlink()
    assert read_machine(root) == expected


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpuset.cpus": "0-3"}, range(4)),
        ({"cpuset.cpus": "0-3", "cpuset.cpus.effective": "2-5"}, range(2, 6)),
        ({"cpuset/cpuset.cpus": "4-9"}, range(4, 10)),
        ({"cpuset/cpuset.cpus": "4-9", "cpuset/cpuset.effective_cpus": "4"}, [4]),
        ({"cpuset.cpus": ""}, range(16)),
    ],
)
def test_cpusets_of_both_versions_without_a_named_group(tmp_path, files, cpus):
    root = TREES["one-node"].write(tmp_path)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_machine(root).allowed_cpus == frozenset(cpus)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "max"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "300000"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "1000", "cpu/cpu.cfs_period_us": "0"}, None),
    ],
)
def test_quotas_of_both_versions_without_a_named_group(tmp_path, files, quota):
    root = TREES["one-node"].write(tmp_path)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_machine(root).cpu_quota == quota


def test_an_empty_root_is_rejected(tmp_path):
    with pytest.raises(HardwareError, match="no CPUs were found; expected a folder that contains"):
        read_machine(tmp_path)


def test_proc_cpuinfo_is_the_last_resort(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name: x\n\nprocessor\t: 1\n")
    machine = read_machine(tmp_path)
    assert [core.cpus for core in machine.cores] == [(0,), (1,)]
    assert machine.numa_nodes[0].cpus == (0, 1)


def test_siblings_in_two_nodes_become_two_cores(tmp_path):
    threads = tuple(Thread(i, (0, i // 2), i % 2, 0) for i in range(4))
    machine = read_machine(Tree(threads, {0: GIB, 1: GIB}).write(tmp_path))
    assert [core.cpus for core in machine.cores] == [(0,), (2,), (1,), (3,)]


# --- this machine -----------------------------------------------------------------------------


def test_this_machine_is_read_with_the_affinity_of_the_process():
    machine = read_machine()
    assert machine.allowed_cpus == os.sched_getaffinity(0)
    one = min(machine.allowed_cpus)
    code = (
        f"import os; os.sched_setaffinity(0, [{one}])\n"
        "from poprun_py.machines.machine_reader import read_machine\n"
        "print(sorted(read_machine().allowed_cpus))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [one]


def test_few_files_are_read_on_a_large_machine(tmp_path, monkeypatch):
    """The files of one CPU list the other CPUs of its core, cache and package."""
    read, text_of = [], Path.read_text

    def read_text(path, *words):
        read.append(path)
        return text_of(path, *words)

    monkeypatch.setattr(Path, "read_text", read_text)
    machine = read_machine(TREES["epyc-nps4"].write(tmp_path))
    assert len(read) < sum(len(core.cpus) for core in machine.cores)


# --- JSON -------------------------------------------------------------------------------------


@given(machines())
def test_a_machine_is_equal_after_saving_and_reading(machine):
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def _leaves(value, path=()):
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


@given(machines(), st.data())
def test_damaged_json_is_rejected_in_one_line_or_is_a_machine(machine, data):
    document = json.loads(json.dumps(machine.to_json()))
    path = data.draw(st.sampled_from(list(_leaves(document))))
    junk = data.draw(
        st.sampled_from([None, -1, 1.5, "x", "0-", [], {}, [None], True, "0-999999", float("inf")])
    )
    if not path:
        document = junk
    else:
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = junk
    message = ""
    try:
        Machine.from_json(document)
    except HardwareError as error:
        message = str(error)
    assert "\n" not in message


def test_the_error_for_another_version_names_both_versions():
    data = snapshot("one-node").to_json() | {"version": 7}
    with pytest.raises(
        HardwareError, match="the saved machine has version 7; expected version 1; save the machine"
    ):
        Machine.from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": []}, "no usable CPU"),
        ({"allowed_cpus": ""}, "no usable CPU"),
        ({"held_cpus": "0-1023"}, "no usable CPU"),
        ({"cpu_quota": 0}, "cpu_quota is 0; expected a number above 0"),
        ({"cpu_quota": "2"}, "cpu_quota is '2'"),
        ({"cpu_quota": 10**400}, "cpu_quota is 1000"),
        ({"numa_nodes": 3}, "numa_nodes is 3; expected a list"),
        ({"numa_nodes": []}, "different CPUs"),
        ({"allowed_cpus": "0-x"}, "'0-x' is not a CPU number or a range of CPU numbers"),
    ],
)
def test_the_error_names_the_contradiction(change, message):
    with pytest.raises(HardwareError, match=message):
        Machine.from_json(snapshot("one-node").to_json() | change)


def test_the_error_names_the_missing_key():
    data = snapshot("one-node").to_json()
    del data["cores"][3]["package"]
    with pytest.raises(HardwareError, match="'package' is missing"):
        Machine.from_json(data)


def test_a_file_with_one_machine_describes_all_hosts():
    machine = snapshot("one-node")
    assert load_machines(json.dumps(machine.to_json()), "m.json", ("a", "b")) == (machine, machine)


def test_a_file_with_several_machines_names_their_hosts():
    small, large = snapshot("one-node"), snapshot("epyc-nps4")
    text = json.dumps({"hosts": {"a": small.to_json(), "b": large.to_json()}})
    assert load_machines(text, "m.json", ("b", "c", "a")) == (large, None, small)
    with pytest.raises(
        HardwareError, match=r"m\.json: the file describes a, b; expected a description of z"
    ):
        load_machines(text, "m.json", ("z",))


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '{"hosts": 3}', '{"hosts": {"a": 3}}', "[" * 99999]
)
def test_other_files_are_rejected(text):
    with pytest.raises(HardwareError, match=r"^m\.json: "):
        load_machines(text, "m.json", ("a",))


def test_a_saved_plan_is_not_accepted_as_a_saved_machine():
    with pytest.raises(HardwareError, match="not a saved machine"):
        load_machines('{"version": 1, "hosts": [{"name": "a"}]}', "plan.json", ("a",))


# --- lists and tables ---------------------------------------------------------------------------


@given(st.sets(st.integers(0, 5000)))
def test_cpu_lists_survive_writing_and_reading(numbers):
    assert parse_cpu_list(ranges_text(frozenset(numbers))) == tuple(sorted(numbers))


def test_cpu_lists_as_kernels_write_them():
    assert parse_cpu_list("0-3,8\n") == (0, 1, 2, 3, 8)
    assert parse_cpu_list("0-10:2/4") == (0, 1, 4, 5, 8, 9)
    assert parse_cpu_list("") == ()
    assert ranges_text([9, 3, 1, 2]) == "1-3,9"


@given(st.text(alphabet="0123456789-,:/ x", max_size=12))
def test_bad_cpu_lists_raise_value_error_only(text):
    try:
        numbers = parse_cpu_list(text)
    except ValueError:
        return
    assert numbers == parse_cpu_list(ranges_text(numbers))
