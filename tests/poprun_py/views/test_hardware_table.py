"""The table of a machine."""

import pytest
from support.sysfs_trees import TREES, snapshot

from poprun_py.hardware.sysfs import format_cpu_list
from poprun_py.views.hardware_table import hardware_table


@pytest.mark.parametrize("name", TREES)
def test_table_names_every_node(name):
    machine = snapshot(name)
    table = hardware_table(machine)
    rows = [line for line in table.splitlines() if line.startswith("|")][1:]
    assert [int(row.split("|")[1]) for row in rows] == [node.index for node in machine.numa_nodes]
    for node in machine.numa_nodes:
        assert format_cpu_list(node.cpus) in table
    assert (f"{machine.quota_cpus}" in table) if machine.cpu_quota else ("quota" not in table)
