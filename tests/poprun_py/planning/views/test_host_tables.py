"""The table of a machine."""

import pytest
from support.launcher.sysfs_trees import TREES, snapshot
from support.terminals import colours_of, plain_lines

from poprun_py.display.formatting import ranges_text
from poprun_py.planning.views.host_tables import hardware_table
from poprun_py.planning.views.text_drawing import TextStyle


@pytest.mark.parametrize(("look", "bar"), [(TextStyle(), "│"), (TextStyle(box_lines=False), "|")])
@pytest.mark.parametrize("name", TREES)
def test_table_names_every_node(name, look, bar):
    machine = snapshot(name)
    table = hardware_table(machine, look)
    rows = [line for line in table.splitlines() if line.startswith(bar)][1:]
    assert [int(row.split(bar)[1]) for row in rows] == [node.index for node in machine.numa_nodes]
    for node in machine.numa_nodes:
        assert ranges_text(node.cpus) in table
    assert (f"{machine.quota_cpus}" in table) if machine.cpu_quota else ("quota" not in table)
    assert look.box_lines or table.isascii()


@pytest.mark.parametrize("name", TREES)
def test_a_narrow_terminal_gets_a_tree_of_the_same_facts(name):
    machine = snapshot(name)
    lines = plain_lines(hardware_table(machine, TextStyle(width=40, colour=True)))
    assert max(map(len, lines)) <= 40
    text = "".join(line.lstrip("│├└─ ") for line in lines)
    for node in machine.numa_nodes:
        assert f"NUMA node {node.index}:" in text
        assert f"CPUs{ranges_text(node.cpus)}" in text.replace(" ", "") or not node.cpus


def test_colours_are_those_of_the_tree():
    machine = snapshot("epyc-nps4")
    assert "\x1b" not in hardware_table(machine)
    for width in (200, 40):
        assert "yellow" in colours_of(hardware_table(machine, TextStyle(colour=True, width=width)))
