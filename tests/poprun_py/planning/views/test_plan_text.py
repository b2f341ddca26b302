"""The tree of a plan: runs folded, as wide as its reader has room."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.launcher.sysfs_trees import SNAPSHOTS
from support.terminals import colours_of, plain_lines

from poprun_py import LaunchConfig, plan
from poprun_py.planning.mpi_commands import OPEN_MPI_5, Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.plan_text import topology_tree
from poprun_py.planning.views.text_drawing import TextStyle, wrapped
from poprun_py.planning.views.topology_table import core_pictures

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)


def planned(machine="epyc-nps4", **fields):
    config = LaunchConfig(hardware=str(SNAPSHOTS / f"{machine}.json"), **fields)
    return plan(config, environ={}, mpi=MPI)


def test_replicas_of_an_instance_are_one_line():
    job = planned("example", num_instances=2, num_replicas=8, ipus_per_replica=2)
    assert topology_tree(job, TextStyle()).splitlines() == [
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
    assert topology_tree(job, TextStyle(box_lines=False)).splitlines() == [
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
    text = topology_tree(job, TextStyle())
    assert len(text.splitlines()) < 60
    assert "1023: IPU" in text


@pytest.mark.parametrize("draw", [topology_tree, core_pictures])
def test_equal_hosts_of_a_large_job_are_drawn_once(draw):
    job = planned(num_instances=512, num_replicas=512, host="n[0-31]")
    *first, line = draw(job, TextStyle()).splitlines()
    assert line == "n[1-31]: as n0, instances 16-511, replicas 16-511, ILDs 0-7"
    assert len(first) < 60
    assert not any("n1" in line for line in first)


@pytest.mark.parametrize("draw", [topology_tree, core_pictures])
def test_hosts_of_each_domain_are_drawn_once(draw):
    colon = ":" if draw is core_pictures else ""
    job = planned(num_instances=64, num_replicas=256, host="n[0-63]")
    lines = draw(job, TextStyle()).splitlines()
    assert [line for line in lines if re.match(r"n\d|n\[", line)] == [
        *(f"n0{colon}", "n[1-15]: as n0, instances 1-15, replicas 4-63, ILD 0"),
        *(f"n16{colon}", "n[17-31]: as n16, instances 17-31, replicas 68-127, ILD 1"),
        *(f"n32{colon}", "n[33-47]: as n32, instances 33-47, replicas 132-191, ILD 2"),
        *(f"n48{colon}", "n[49-63]: as n48, instances 49-63, replicas 196-255, ILD 3"),
    ]


@pytest.mark.parametrize("draw", [topology_tree, core_pictures])
def test_a_host_unlike_its_neighbours_is_drawn(draw):
    colon = ":" if draw is core_pictures else ""
    job = planned(num_instances=12, num_replicas=12, host="a[0-5]")
    machines = (*job.machines[:3], None, *job.machines[4:])
    lines = draw(replace(job, machines=machines), TextStyle()).splitlines()
    assert [line for line in lines if line.startswith("a")] == [
        *(f"a0{colon}", "a[1-2]: as a0, instances 2-5, replicas 2-5"),
        *(f"a3{colon}", f"a4{colon}", "a5: as a4, instances 10-11, replicas 10-11"),
    ]


@pytest.mark.parametrize("draw", [topology_tree, core_pictures])
@pytest.mark.parametrize("instances", [2, 64, 256])
def test_forty_columns_are_enough_for_256_cpus(draw, instances):
    job = planned(num_instances=instances, num_replicas=instances, host="a,b")
    look = TextStyle(colour=True, width=40)
    narrow, wide = draw(job, look), draw(job, TextStyle())
    assert max(map(len, plain_lines(narrow))) <= 40
    assert facts(plain_lines(narrow)) == facts(wide.splitlines())


def facts(lines):
    """Return what lines say, wherever they are broken."""
    return "".join(line.strip("│├└─| ") for line in lines).replace(" ", "").replace("|", "")


def test_colours_and_their_absence():
    job = planned(num_instances=2, num_replicas=8)
    assert colours_of(topology_tree(job, TextStyle(colour=True))) == {
        "bold",
        "yellow",
        "green",
        "cyan",
    }
    assert colours_of(core_pictures(job, TextStyle(colour=True))) == {"bold", "yellow", "green"}
    for draw in (topology_tree, core_pictures):
        assert "\x1b" not in draw(job, TextStyle())


def test_lines_are_broken_after_commas_and_only_then_at_blanks():
    assert wrapped("CPUs 0-7,16-23, 12 threads", 16) == ["CPUs 0-7,16-23,", "12 threads"]
    assert wrapped("distances 10 12 12 12", 14) == ["distances 10", "12 12 12"]
    assert wrapped("one, two", None) == ["one, two"]


def test_what_is_questionable_on_equal_hosts_is_said_once():
    job = planned("bare", num_instances=24, num_replicas=24, host="n[0-3]", oversubscribe=True)
    warnings = [each for each in plan_warnings(job) if "share" in each]
    assert warnings == ["n[0-3]: 6 instances share 4 CPUs: at most 4 run at any time"]
