"""docs/placement.md shows what the tool draws today."""

import importlib.util
import json
import re

from support.repository import ROOT
from support.sysfs_trees import SNAPSHOTS

from poprun_py import LaunchConfig
from poprun_py.hardware.reader import Machine
from poprun_py.hosts.host_list import parse_host_list
from poprun_py.planning.cpu_placement import MODES, PlacementPolicy, place
from poprun_py.planning.topology import make_topology
from poprun_py.views.hardware_table import hardware_table
from poprun_py.views.placement_picture import placement_picture
from poprun_py.views.topology_text import topology_table

PAGE = ROOT / "docs" / "placement.md"
EXAMPLE = SNAPSHOTS / "example.json"
BLOCK = re.compile(r"<!-- (table|domains|picture: [^>]+) -->\n```\n(.*?)```\n", re.DOTALL)


def drawn(what: str) -> str:
    machine = Machine.from_json(json.loads(EXAMPLE.read_text()))
    if what == "table":
        return hardware_table(machine)
    if what == "domains":
        config = LaunchConfig(num_replicas=8, ipus_per_replica=16, num_instances=4)
        return topology_table(make_topology(config, parse_host_list("h0,h1", source="test")))
    mode, count, *options = what.removeprefix("picture: ").split()
    values = {name: int(value) for name, value in (option.split("=") for option in options)}
    policy = PlacementPolicy(mode, **values)
    return placement_picture(machine, place(machine, int(count), policy))


def test_page_shows_what_the_tool_draws(request):
    page = PAGE.read_text()
    fresh = BLOCK.sub(lambda m: f"<!-- {m[1]} -->\n```\n{drawn(m[1])}\n```\n", page)
    if request.config.getoption("--rewrite-goldens"):
        PAGE.write_text(fresh)
    assert PAGE.read_text() == fresh


def test_page_has_a_picture_of_each_mode():
    shown = [match[1].split() for match in BLOCK.finditer(PAGE.read_text())]
    assert {words[1] for words in shown if words[0] == "picture:"} == set(MODES)


def test_pictures_of_the_page_are_what_the_tool_draws():
    spec = importlib.util.spec_from_file_location("placement", PAGE.with_suffix(".py"))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert len(script.JOBS) == 3
    for name in script.JOBS:
        drawing = PAGE.with_name(name).read_text()
        assert drawing == script.picture(name), "old: python docs/placement.py"
        page = PAGE if name != "main-job.svg" else PAGE.with_name("index.md")
        assert f"]({name})" in page.read_text()
