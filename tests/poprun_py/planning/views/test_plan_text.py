"""A plan as a tree and as a map of cores, for wide and narrow terminals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.launcher.plans import placing
from support.launcher.sysfs_trees import SNAPSHOTS, snapshot
from support.terminals import colours_of, plain_lines

from poprun_py import LaunchConfig, plan
from poprun_py.planning.cpu_placement import place
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views import plan_text
from poprun_py.planning.views.plan_text import core_map, placement_text
from poprun_py.planning.views.plan_tree import plan_tree
from poprun_py.planning.views.text_drawing import TextStyle, wrapped

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)


def tree_text(job, style):
    return plan_text.tree_text(plan_tree(job), style)


def cores_text(job, style):
    return plan_text.cores_text(plan_tree(job), style)


def map_of(machine, count, policy):
    return core_map(machine, dict(enumerate(place(machine, count, policy))))


def planned(machine="epyc-nps4", **fields):
    config = LaunchConfig(hardware=str(SNAPSHOTS / f"{machine}.json"), **fields)
    return plan(config, environ={}, mpi=MPI)


def test_replicas_of_an_instance_are_one_line():
    job = planned("example", num_instances=2, num_replicas=8, ipus_per_replica=2)
    assert tree_text(job, TextStyle()).splitlines() == [
        "localhost",
        "├─ NUMA nodes 0-1: CPUs 0-15,32-47, 64.0 GiB",
        "│  └─ instance 0: CPUs 0-15,32-47, 16 threads, ILD 0",
        "│     └─ replicas 0-3: IPUs 0-7, 2 each",
        "└─ NUMA nodes 2-3: CPUs 16-31,48-63, 64.0 GiB",
        "   └─ instance 1: CPUs 16-31,48-63, 16 threads, ILD 0",
        "      └─ replicas 4-7: IPUs 8-15, 2 each",
    ]


def test_instances_on_the_same_cpus_are_one_line():
    job = planned("example", num_instances=8, num_replicas=16, process_placement="disabled")
    assert tree_text(job, TextStyle(box_lines=False)).splitlines() == [
        "localhost",
        "`- any CPU",
        "   `- instances 0-7: any CPU, 4 threads each, 2 replicas each, ILD 0",
        "      `- replicas 0-15: IPUs 0-15",
    ]


@pytest.mark.parametrize("instances", [4, 16, 1024])
def test_a_thousand_replicas_fit_on_a_page(instances):
    job = planned(
        num_instances=instances, num_replicas=1024, host="a,b,c,d", oversubscribe=True,
        process_placement="disabled" if instances > 16 else "spreadnuma",
    )  # fmt: skip
    text = tree_text(job, TextStyle())
    assert len(text.splitlines()) < 60
    assert "1023: IPU" in text


@pytest.mark.parametrize("draw", [tree_text, cores_text])
def test_equal_hosts_of_a_large_job_are_drawn_once(draw):
    job = planned(num_instances=512, num_replicas=512, host="n[0-31]")
    *first, line = draw(job, TextStyle()).splitlines()
    assert line == "n[1-31]: as n0, instances 16-511, replicas 16-511, ILDs 0-7"
    assert len(first) < 60
    assert not any("n1" in line for line in first)


@pytest.mark.parametrize("draw", [tree_text, cores_text])
def test_hosts_of_each_domain_are_drawn_once(draw):
    colon = ":" if draw is cores_text else ""
    job = planned(num_instances=64, num_replicas=256, host="n[0-63]")
    lines = draw(job, TextStyle()).splitlines()
    assert [line for line in lines if re.match(r"n\d|n\[", line)] == [
        *(f"n0{colon}", "n[1-15]: as n0, instances 1-15, replicas 4-63, ILD 0"),
        *(f"n16{colon}", "n[17-31]: as n16, instances 17-31, replicas 68-127, ILD 1"),
        *(f"n32{colon}", "n[33-47]: as n32, instances 33-47, replicas 132-191, ILD 2"),
        *(f"n48{colon}", "n[49-63]: as n48, instances 49-63, replicas 196-255, ILD 3"),
    ]


@pytest.mark.parametrize("draw", [tree_text, cores_text])
def test_a_host_that_differs_from_its_neighbours_is_drawn(draw):
    colon = ":" if draw is cores_text else ""
    job = planned(num_instances=12, num_replicas=12, host="a[0-5]")
    machines = (*job.machines[:3], None, *job.machines[4:])
    lines = draw(replace(job, machines=machines), TextStyle()).splitlines()
    assert [line for line in lines if line.startswith("a")] == [
        *(f"a0{colon}", "a[1-2]: as a0, instances 2-5, replicas 2-5"),
        *(f"a3{colon}", f"a4{colon}", "a5: as a4, instances 10-11, replicas 10-11"),
    ]


@pytest.mark.parametrize("draw", [tree_text, cores_text])
@pytest.mark.parametrize("instances", [2, 64, 256])
def test_forty_columns_are_enough_for_256_cpus(draw, instances):
    job = planned(num_instances=instances, num_replicas=instances, host="a,b")
    look = TextStyle(colour=True, width=40)
    narrow, wide = draw(job, look), draw(job, TextStyle())
    assert max(map(len, plain_lines(narrow))) <= 40
    assert facts(plain_lines(narrow)) == facts(wide.splitlines())


def facts(lines):
    """Return the words of lines without the line breaks."""
    return "".join(line.strip("│├└─| ") for line in lines).replace(" ", "").replace("|", "")


def test_colours_are_optional():
    job = planned(num_instances=2, num_replicas=8)
    assert colours_of(tree_text(job, TextStyle(colour=True))) == {
        "bold",
        "yellow",
        "green",
        "cyan",
    }
    assert colours_of(cores_text(job, TextStyle(colour=True))) == {"bold", "yellow", "green"}
    for draw in (tree_text, cores_text):
        assert "\x1b" not in draw(job, TextStyle())


def test_lines_are_broken_after_commas_and_if_necessary_at_blanks():
    assert wrapped("CPUs 0-7,16-23, 12 threads", 16) == ["CPUs 0-7,16-23,", "12 threads"]
    assert wrapped("distances 10 12 12 12", 14) == ["distances 10", "12 12 12"]
    assert wrapped("one, two", None) == ["one, two"]


def test_equal_hosts_share_a_warning():
    job = planned("bare", num_instances=24, num_replicas=24, host="n[0-3]", oversubscribe=True)
    warnings = [each for each in plan_warnings(job) if "share" in each]
    assert warnings == [
        "n[0-3]: 6 instances share 4 CPUs, so at most 4 instances run at the same time"
    ]


def test_placement_text_names_cpus_memory_and_threads():
    machine = snapshot("example")
    assert [placement_text(each) for each in place(machine, 3, placing())] == [
        "CPUs 0-15,32-47; memory of nodes 0-1; 16 threads",
        "CPUs 16-23,48-55; memory of node 2; 8 threads",
        "CPUs 24-31,56-63; memory of node 3; 8 threads",
    ]
    one = place(snapshot("quota-container-v1"), 2, placing())[0]
    assert placement_text(one) == "CPU 1; any memory; 1 thread"


def test_core_map_shows_instances_and_idle_forbidden_and_slow_cores():
    machine = snapshot("cpuset-container")
    text = map_of(machine, 2, placing(cores_per_instance=2))
    assert text.splitlines() == [
        "node 0   | 0 0 . . . . . . x x x x x x x x |",
        "node 1   | 1 1 x x x x x x x x x x x x x x |",
        "(. no instance, x not allowed)",
        "instance 0: CPUs 0-1,32-33; any memory; 2 threads",
        "instance 1: CPUs 16-17; any memory; 2 threads",
    ]
    hybrid = snapshot("hybrid")
    rows = map_of(hybrid, 2, placing()).splitlines()
    assert rows[0].split() == ["node", "0", "|", *"00001111", *["0'"] * 8, *["1'"] * 8, "|"]


def test_core_map_of_memory_without_cpus_and_of_shared_cores():
    machine = snapshot("memory-only-node")
    rows = map_of(machine, 3, placing("disabled")).splitlines()
    assert rows[:3] == ["node 0   | * * * * |", "node 1   | * * * * |", "node 2   | memory only |"]
    assert "instance 2: any CPU; any memory; 2 threads" in rows
