"""PopRun's topology table, character for character."""

from __future__ import annotations

import pytest

from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.views.plan_text import topology_table

# (replicas, instances, IPUs per replica, ILDs, hosts)
CASES = {
    "8x2": (8, 2, 1, None, None),
    "8x4_two_hosts": (8, 4, 1, None, "host0,host1"),
    "8x4_four_hosts_two_ilds": (8, 4, 1, 2, "host[0-3]"),
    "4x2_two_ilds": (4, 2, 1, 2, None),
    "8x4_two_ipus": (8, 4, 2, None, None),
    "16x2_addresses": (16, 2, 1, None, "10.1.3.101,10.1.3.102"),
    "2x2": (2, 2, 1, None, None),
    "1x1": (1, 1, 1, None, None),
    "10x2": (10, 2, 1, None, None),
    "100x4": (100, 4, 1, None, None),
    "2x2_two_ilds": (2, 2, 1, 2, None),
    "8x4_two_hosts_two_ilds": (8, 4, 16, 2, "h[0-1]"),
    "8x8_four_hosts_four_ilds": (8, 8, 1, 4, "h[0-3]"),
    "6x6_ilds_across_hosts": (6, 6, 1, 2, "h[0-2]"),
}


def topology(replicas, instances, ipus, ilds, hosts):
    config = LaunchConfig(
        num_replicas=replicas, num_instances=instances, ipus_per_replica=ipus, num_ilds=ilds
    )
    return make_topology(config, parse_host_list(hosts, source="test") if hosts else (LOCALHOST,))


@pytest.mark.parametrize("name", CASES)
def test_table(name, golden):
    golden(f"table_{name}.txt", topology_table(topology(*CASES[name])) + "\n")


@pytest.mark.parametrize("replicas", [256, 4096])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_wide_table_is_elided_to_the_terminal(replicas, width):
    table = topology_table(
        topology(replicas, 64, 1, None, "a-rather-long-host-name-[00-31]"), max_width=width
    )
    grid = [line for line in table.splitlines() if line.startswith(("|", " ="))]
    assert max(map(len, grid)) <= width
    assert "..." in grid[-1]
    assert str(replicas - 1) in grid[-1]
    assert f"{replicas} replicas, 64 instances, 32 hosts" in table


def test_elided_table_is_explained(golden):
    wide = topology(256, 64, 1, None, "a-rather-long-host-name-[0-3]")
    golden("table_256x64_elided.txt", topology_table(wide, max_width=100) + "\n")


def test_hosts_that_are_not_shown_are_a_range():
    table = topology_table(topology(4096, 4096, 1, None, "h[1-256]"), max_width=100)
    line = "h[1-256]: 16 instances each, from 0-15 on h1 to 4080-4095 on h256"
    assert line in table.splitlines()
    single = topology_table(topology(64, 64, 1, None, "h[1-64]"), max_width=40)
    assert "h[1-64]: one instance each, from 0 on h1 to 63 on h64" in single.splitlines()


def test_table_that_fits_is_not_elided():
    small = topology(8, 2, 1, None, None)
    assert topology_table(small, max_width=46) == topology_table(small)
