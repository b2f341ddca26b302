"""The picture of a plan, for typical plans (golden files) and for random plans."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.machines import machines
from support.launcher.plans import placing, plan_blindly
from support.launcher.svg_boxes import SVG, boxes
from support.launcher.sysfs_trees import SNAPSHOTS, snapshot

from poprun_py import LaunchConfig, plan
from poprun_py.machines.host_list import Host
from poprun_py.planning.cpu_placement import MODES, place
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.plan_pictures import host_pictures, plan_svg
from poprun_py.planning.views.plan_tree import plan_tree

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)


def planned(machine, **fields):
    config = LaunchConfig(hardware=str(SNAPSHOTS / f"{machine}.json"), **fields)
    return plan(config, environ={}, mpi=MPI)


def on_unequal_hosts():
    job = planned("bare", num_instances=6, num_replicas=12, num_ilds=2, host="a,b,c")
    names = ("bare", "example", "hybrid")
    hosts = [(snapshot(n), place(snapshot(n), 2, LaunchConfig())) for n in names]
    placements = [placement for _, placed in hosts for placement in placed]
    return replace(
        job,
        machines=tuple(machine for machine, _ in hosts),
        instances=tuple(
            replace(each, placement=placement)
            for each, placement in zip(job.instances, placements, strict=True)
        ),
    )


CASES = {
    "laptop": lambda: planned("bare", num_instances=2, num_replicas=4),
    "two_nodes": lambda: planned("two-socket-smt", num_instances=4, num_replicas=8),
    "smt": lambda: planned("one-node", num_instances=10, num_replicas=10),
    "sixteen_hosts": lambda: planned(
        "example", num_instances=64, num_replicas=128, num_ilds=4, host="n[0-15]"
    ),
    "unequal_hosts": on_unequal_hosts,
    "oversubscribed": lambda: planned(
        "bare", num_instances=12, num_replicas=12, oversubscribe=True
    ),
    "unbound": lambda: planned(
        "example", num_instances=4, num_replicas=8, process_placement="disabled"
    ),
    "crossing": lambda: planned(
        "example", num_instances=3, num_replicas=3, cores_per_instance=9,
        process_placement="packnuma", ipus_per_replica=16,
    ),
    "not_allowed": lambda: planned(
        "cpuset-container", num_instances=2, num_replicas=2, cores_per_instance=2
    ),
}  # fmt: skip


def texts(picture: str) -> list[str]:
    return [box.text for box in boxes(picture)[0]]


@pytest.mark.parametrize("name", [name for name in CASES if name != "sixteen_hosts"])
def test_picture(name, golden):
    golden(f"plan_{name}.svg", plan_svg(CASES[name]()) + "\n")


def assert_is_drawn_well(picture: str) -> None:
    """Check that no block overlaps a text or exceeds its frame or the picture."""
    words, (whole, *frames) = boxes(picture)
    assert all(whole.holds(box) for box in (*words, *frames))
    by_height = sorted(words, key=lambda box: box.top)
    for index, word in enumerate(by_height):
        for other in by_height[index + 1 :]:
            if other.top >= word.bottom:
                break
            assert not word.overlaps(other), (word, other)
    # A cell of two instances has two halves with one label.
    for frame in (box for box in frames if not box.kind.startswith("own")):
        for word in words:
            assert frame.holds(word) or not frame.overlaps(word), (frame, word)


@pytest.mark.parametrize("name", CASES)
def test_no_text_overlaps_another_or_crosses_an_edge(name):
    assert_is_drawn_well(plan_svg(CASES[name]()))


@given(
    machine=machines(),
    mode=st.sampled_from(list(MODES)),
    instances=st.integers(1, 20),
    replicas=st.integers(1, 12),
    width=st.sampled_from([1, 2, 16]),
    hosts=st.integers(1, 6),
)
def test_every_plan_can_be_drawn(machine, mode, instances, replicas, width, hosts):
    job = plan_blindly(
        LaunchConfig(
            num_instances=instances * hosts, num_replicas=instances * hosts * replicas,
            ipus_per_replica=width,
        ),
        hosts=tuple(Host(name=f"a-rather-long-name-{n}") for n in range(hosts)),
        mpi=MPI, environ={},
    )  # fmt: skip
    placements = place(machine, instances, placing(mode, oversubscribe=True))
    drawn = replace(
        job,
        machines=(machine,) * hosts,
        instances=tuple(
            replace(each, placement=placements[each.instance.local_index]) for each in job.instances
        ),
    )
    assert_is_drawn_well(plan_svg(drawn))


def test_description_contains_the_plan():
    root = ElementTree.fromstring(plan_svg(CASES["two_nodes"]()))
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "4 instances, 8 replicas, 8 IPUs on localhost"
    told = root.findtext(f"{SVG}desc")
    assert "instance 1: CPUs 8-15,40-47, 8 threads, ILD 0; replicas 2-3: IPUs 2-3;" in told


def test_cells_have_labels_besides_colours():
    # The label of a cell names the instances and marks special cores.
    assert (
        texts(plan_svg(CASES["crossing"]())).count("0") == 9 + 2
    )  # the sign of instance 0, and IPU 0
    # One half of the machine is not allowed, and threads of two cores.
    assert texts(plan_svg(CASES["not_allowed"]())).count("x") == 8 + 2 + 14
    assert texts(plan_svg(CASES["unbound"]())).count("*") == 32
    assert texts(plan_svg(CASES["crossing"]())).count("! crosses NUMA nodes 0-1") == 1


def test_hardware_threads_of_different_instances_have_separate_cells():
    picture = plan_svg(CASES["smt"]())
    cells = [box for box in boxes(picture)[1] if box.kind.startswith("own")]
    heights = [box.bottom - box.top for box in cells]
    # Six of eight cores belong to one instance each; the signs of the ten instances are 20 high.
    assert {height: heights.count(height) for height in heights} == {24: 6, 12: 4, 20: 10}


@pytest.mark.parametrize("hosts", [5, 32, 256])
def test_equal_hosts_are_one_card(hosts):
    job = planned("example", num_instances=2 * hosts, num_replicas=2 * hosts, host=f"n[1-{hosts}]")
    picture = plan_svg(job)
    assert len(host_pictures(plan_tree(job)).svgs) == 1
    assert f"n1, and {hosts - 1} like it" in texts(picture)
    assert len(picture) < 40_000


@pytest.mark.parametrize("hosts", [16, 64])
def test_the_hosts_of_each_domain_are_one_card(hosts):
    job = planned("example", num_instances=64, num_replicas=256, host=f"n[1-{hosts}]")
    said = texts(plan_svg(job))
    share = hosts // 4
    assert said[1] == "256 IPUs in 4 IPU-Link domains on " + f"{hosts} hosts"
    for domain in range(4):
        first, last = domain * share + 1, (domain + 1) * share
        assert f"n{first}, and {share - 1} like it" in said
        assert f"IPU-Link domain {domain} on n[{first}-{last}]" in said
        assert f"IPUs {domain * 64}-{domain * 64 + 63} of 256" in said
    assert_is_drawn_well(plan_svg(job))


def test_only_the_first_and_last_of_many_instances_and_replicas_are_drawn():
    job = planned("epyc-nps4", num_instances=64, num_replicas=640)
    said = texts(plan_svg(job))
    assert "instance 63 (replicas 630-639)" in said
    assert {"R630", "R635", "R639"} < set(said)
    assert "R636" not in said


@pytest.mark.parametrize(
    ("num_ilds", "frames", "hidden"),
    [
        (1, "0", ["10-62 likewise"]),
        (2, "01", ["4-30 likewise", "36-62 likewise"]),
        (4, "0123", [f"{16 * n + 1}-{16 * n + 14} likewise" for n in range(4)]),
        (8, "017", [
            "1-6 likewise", "9-14 likewise", "16-55 likewise in IPU-Link domains 2-6",
            "57-62 likewise",
        ]),
        (64, ["0", "1", "63"], ["2-62 likewise in IPU-Link domains 2-62"]),
    ],
)  # fmt: skip
def test_hidden_instances_are_named_within_their_domain(num_ilds, frames, hidden):
    job = planned("epyc-nps4", num_instances=64, num_replicas=64, num_ilds=num_ilds)
    said = texts(plan_svg(job))
    titles = [text for text in said if text.startswith("IPU-Link domain")]
    assert titles == [f"IPU-Link domain {domain}" for domain in frames]
    assert [text for text in said if "likewise" in text] == [f"instances {h}" for h in hidden]
    # Drawn and hidden instances are in the order of their numbers.
    numbers = [int(re.split("[ -]", t)[1]) for t in said if re.match(r"instances? \d", t)]
    assert numbers == sorted(numbers)


def test_warnings_of_the_plan_are_in_its_picture():
    job = CASES["oversubscribed"]()
    said = " ".join(texts(plan_svg(job)))
    assert plan_warnings(job)
    assert all(f"! {sentence}" in said for sentence in plan_warnings(job))


def test_an_unknown_host_is_named():
    job = replace(CASES["laptop"](), machines=(None,))
    assert "unknown machine" in texts(plan_svg(job))


def test_characters_that_xml_does_not_allow_are_replaced():
    job = replace(CASES["laptop"](), refusal="<b>&\"' \x1b[1m \udcff ü 😀 \uffff")
    picture = plan_svg(job)
    assert picture.isascii()
    assert "<b>&\"' \ufffd[1m \ufffd ü 😀 \ufffd" in " ".join(texts(picture))


def test_cards_fit_on_the_screen_of_a_telephone():
    for job in (CASES["sixteen_hosts"](), CASES["unequal_hosts"]()):
        for picture in host_pictures(plan_tree(job)).svgs:
            assert int(ElementTree.fromstring(picture).get("width")) <= 376


def test_colours_differ_between_neighbours_on_light_and_on_dark_ground():
    style = ElementTree.fromstring(plan_svg(CASES["laptop"]())).findtext(f"{SVG}style")
    light, _, dark = style.partition("@media screen and (prefers-color-scheme:dark)")
    for colours in (light, dark):
        own = [colours.partition(f".own{n}{{fill:")[2][:7] for n in range(8)]
        assert all(own)
        assert all(one != other for one, other in pairwise([*own, own[0]]))
        assert len(set(own)) == len(own)
        assert all(contrast(each, label_colour(colours)) >= 4.5 for each in own)


def label_colour(colours: str) -> str:
    return colours.partition(".label{fill:")[2][:7]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours; WCAG 2 (level AA) demands 4.5 for text."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (
            p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
