"""A launch plan as an SVG picture of its hosts, and as an HTML page with such pictures.

Each group of equal hosts is drawn as one card. A card is a frame that shows the first host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from popdist_py.errors import counted
from popdist_py.html_pages.page import Alert, Code, InlineSvgs, Section, Sentence, Table, page
from poprun_py.display.formatting import bytes_text, numbered, ranges_text
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.planning.cpu_placement import hardware_threads
from poprun_py.planning.instances_on_hosts import Topology
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.host_tables import machine_summary
from poprun_py.planning.views.plan_text import placement_text, tree_text
from poprun_py.planning.views.plan_tree import (
    FORBIDDEN,
    IDLE,
    LEGEND,
    MANY,
    SLOW,
    HostGroup,
    InstanceGroup,
    PlanTree,
    cache_groups,
    core_labels,
    plan_tree,
)
from poprun_py.planning.views.svg import (
    STYLE,
    Block,
    beside,
    cell,
    described,
    document,
    flowing,
    framed,
    paragraph,
    stacked,
)
from poprun_py.planning.views.text_drawing import TextStyle

# The width of the card of a host in pixels (a telephone's screen is wide enough), and the maximum
# number of cards in a row.
_CARD, _MOST_COLUMNS = 368, 3
_PAD, _INNER_PAD, _GAP, _CELL_GAP, _CACHE_GAP = 12, 7, 10, 2, 5
_THREAD_HEIGHT = 12
# A group of several hosts is drawn as a pile of cards. _PILE_SHIFT is the distance between
# the edges of neighbouring cards of a pile, in pixels.
_PILE_SHIFT = 4
_COLOURS = 8
_CLASSES = {IDLE: "idle", FORBIDDEN: "closed", MANY: "many"}
# If no NUMA node of a host has more cores than this number, two NUMA nodes are drawn in a row.
_MOST_IN_HALF = 8
# The maximum numbers of IPU-Link domains, instances, replicas and IPUs in a picture. If a plan
# has more of them, the first ones and the last one are drawn. _MOST_INSTANCES applies to each host.
_MOST_DOMAINS, _MOST_INSTANCES, _MOST_REPLICAS, _MOST_IPUS = 4, 12, 8, 8
_FEWEST_INSTANCES = 3
# The headings of the columns in the table of instances.
_COLUMNS = (
    *("host", "instance", "NUMA nodes", "CPUs", "memory of nodes", "threads"),
    *("replicas", "IPUs", "IPU-Link domain"),
)


def plan_svg(plan: LaunchPlan) -> str:
    """Return a picture of a launch plan as an SVG document, in ASCII, without a final newline.

    The reader's preference for light or dark pages decides about the colours of the picture. The
    description in the SVG document contains the whole plan as text.
    """
    tree = plan_tree(plan)
    cards = [_card(tree, host, is_wide=len(tree.hosts) == 1) for host in tree.hosts]
    widest = max(card.width for card in cards)
    # A POD256 has four IPU-Link domains, so the cards of four hosts are drawn as a square.
    columns = 2 if len(cards) == 4 else min(len(cards), _MOST_COLUMNS)
    width = columns * (widest + _GAP) - _GAP
    parts = [
        paragraph(tree.headline, "title", width),
        *(_alert(sentence, width) for sentence in plan_warnings(plan)),
        flowing(cards, width, gap=_GAP),
        paragraph(legend(tree), "note", width),
    ]
    whole = framed(stacked(parts, gap=_GAP), "page", pad=_PAD, width=width + 2 * _PAD)
    lines = tree_text(tree, TextStyle(box_lines=False)).split("\n")
    description = "; ".join(line.lstrip(" |`-") for line in lines)
    return document(whole, title=tree.headline, description=description, style=STYLE)


def plan_page(plan: LaunchPlan) -> str:
    """Return a launch plan as an HTML page, in ASCII, without a final newline.

    The HTML page is also well-formed XML.
    """
    tree = plan_tree(plan)
    hidden = Sentence(
        "The command does not contain the values of --env; set these variables before you run the "
        "command."
    )
    command = Code(launch_command(plan.config))
    return page(
        tree.headline,
        [
            Section("Instances", [instances_table(tree)]),
            Section("Command", [hidden, command] if plan.config.env else [command]),
        ],
        opening=[
            *map(Alert, plan_warnings(plan)),
            host_pictures(tree),
            Sentence(legend(tree)),
        ],
    )


def instances_table(tree: PlanTree) -> Table:
    """Return a table with the CPUs, replicas and IPUs of each instance.

    The table has rows for the instances of the first host in each group of equal hosts. A row with
    only one cell describes the other hosts of a group.
    """
    rows: list[tuple[str, ...]] = []
    for host in tree.hosts:
        for group in host.instances:
            placement = group.placement
            each = " each" if len(group.indices) > 1 else ""
            rows.append(
                (
                    host.name,
                    ranges_text(group.indices),
                    ranges_text(placement.numa_nodes) or "any",
                    ranges_text(placement.cpus) or "any",
                    ranges_text(placement.memory_nodes) or "any",
                    f"{placement.threads or 'unset'}{each}",
                    ranges_text(group.replicas),
                    ranges_text(group.ipus),
                    str(group.ild),
                )
            )
        if host.others:
            rows.append((f"{host.others}: {host.others_details('IPU-Link domain')}",))
    return Table("Instances", _COLUMNS, rows)


def host_pictures(tree: PlanTree) -> InlineSvgs:
    """Return a picture of each group of equal hosts, for an HTML page."""
    pictures = [
        document(_card(tree, host), title=f"Cores, instances and IPUs of {compress(host.names)}")
        for host in tree.hosts
    ]
    return InlineSvgs(pictures, re.sub(r"\.([a-z]\w*)\{", r".poprun-py .\1{", STYLE))


def legend(tree: PlanTree) -> str:
    """Return a sentence that explains the signs in the pictures of a launch plan."""
    drawn = [
        (host.machine, core_labels(host.machine, host.placements))
        for host in tree.hosts
        if host.machine is not None
    ]
    cores = [(core, label) for machine, label in drawn for core in machine.cores]
    has_gaps = any(
        len(cache_groups(machine, node)) > 1 for machine, _ in drawn for node in machine.numa_nodes
    )
    shown = "".join(label(thread) for core, label in cores for thread in hardware_threads((core,)))
    has_threads = any(len(core.cpus) > 1 for core, _ in cores)
    signs = [
        *(["a cell is a core with the index of its instance"] if cores else []),
        *(["notches: its hardware threads"] if has_threads else []),
        *(["wider gap: another L3 cache"] if has_gaps else []),
        *(f"{sign} {text}" for sign, text in LEGEND.items() if sign in shown),
        "R: a replica with its IPUs",
    ]
    text = "; ".join(signs)
    return f"{text[0].upper()}{text[1:]}."


# --- drawing a host with its NUMA nodes and cores -----------------------------------------------


def _card(tree: PlanTree, host: HostGroup, *, is_wide: bool = False) -> Block:
    """Draw the first host of a group of equal hosts as a card.

    If ``is_wide``, the instances are drawn beside the cores, else below the cores.
    """
    machine = host.machine
    width = _CARD - 2 * _PAD
    title = f"{host.name}, and {len(host.names) - 1} like it" if host.others else host.name
    facts = machine_summary(machine) if machine is not None else ["unknown machine"]
    if host.others:
        facts.append(f"{host.others}: {host.others_details('IPU-Link domain')}")
    heading = [paragraph(title, "title", width), *(paragraph(f, "note", width) for f in facts)]
    nodes = [_nodes(machine, host, width)] if machine is not None else []
    hardware = stacked([stacked(heading, gap=2), *nodes], gap=_GAP)
    instances = stacked(_instances(tree.topology, host, width), gap=_GAP)
    both = (beside if is_wide else stacked)([hardware, instances], gap=_GAP)
    card = framed(both, "card", pad=_PAD, width=_CARD)
    return _piled(card) if host.others else card


def _piled(card: Block) -> Block:
    """Draw the edges of two more cards behind ``card``, so that a pile of cards appears."""
    edges = "".join(
        f'<rect class="card" x="{_PILE_SHIFT * n}" y="{_PILE_SHIFT * n}" width="{card.width}" '
        f'height="{card.height}" rx="4"/>'
        for n in (2, 1)
    )
    return Block(card.width + 2 * _PILE_SHIFT, card.height + 2 * _PILE_SHIFT, f"{edges}{card.body}")


def _nodes(machine: Machine, host: HostGroup, width: int) -> Block:
    label_of = core_labels(machine, host.placements)
    sizes = [sum(c.numa_node == n.index for c in machine.cores) for n in machine.numa_nodes]
    is_half = len(sizes) > 1 and max(sizes) <= _MOST_IN_HALF
    node_width = (width - _INNER_PAD) // 2 if is_half else width
    nodes = [
        _node(machine, node, label_of, host.first_index, node_width) for node in machine.numa_nodes
    ]
    return flowing(nodes, width, gap=_INNER_PAD)


def _node(
    machine: Machine, node: NumaNode, label_of: Callable[[Core], str], first: int, width: int
) -> Block:
    """Draw a NUMA node with a cell for each core, and wide gaps between different L3 caches."""
    inner = width - 2 * _INNER_PAD
    cpus = numbered("CPU", node.cpus) if node.cpus else "memory only"
    memory = f"; {bytes_text(node.memory_bytes)}" if node.memory_bytes else ""
    caches = [
        flowing((_core(core, label_of, first) for core in group), inner, gap=_CELL_GAP)
        for group in cache_groups(machine, node)
    ]
    parts = [
        paragraph(f"NUMA node {node.index}", "name", inner),
        paragraph(f"{cpus}{memory}", "note", inner),
        flowing(caches, inner, gap=_CACHE_GAP),
    ]
    return framed(stacked(parts, gap=4), "node", pad=_INNER_PAD, width=width)


def _core(core: Core, label_of: Callable[[Core], str], first: int) -> Block:
    """Draw a core, with a cell for each hardware thread if the threads have different labels."""
    texts = [label_of(thread) for thread in hardware_threads((core,))]
    widest = max(texts, key=len)
    if len(set(texts)) == 1:
        height = max(17, _THREAD_HEIGHT * len(texts))
        drawn = _label_cell(widest, first, height=height, notches=len(texts) - 1)
    else:
        least = _label_cell(widest, first, height=_THREAD_HEIGHT).width
        threads = (_label_cell(text, first, height=_THREAD_HEIGHT, least=least) for text in texts)
        drawn = stacked(threads, gap=1)
    signs = dict.fromkeys(text.rstrip(SLOW) for text in texts)
    owners = ", ".join(LEGEND.get(sign, f"instance {sign}") for sign in signs)
    return described(drawn, f"{numbered('CPU', core.cpus)}: {owners}")


def _label_cell(label: str, first: int, *, height: int, notches: int = 0, least: int = 17) -> Block:
    """Draw a cell for a core, in the colours of the instances that ``label`` names."""
    sign = label.rstrip(SLOW)
    kinds = [_CLASSES[sign]] if sign in _CLASSES else [
        f"own{(int(index) - first) % _COLOURS}" for index in sign.split("/")
    ]  # fmt: skip
    return cell(label, *kinds, height=height, notches=notches, least=least)


# --- drawing the instances of a host ------------------------------------------------------------


def _instances(topology: Topology, host: HostGroup, width: int) -> Iterator[Block]:
    """Yield a frame for each IPU-Link domain of a host, with the instances in the domain.

    If there are too many IPU-Link domains or instances, only the first ones and the last one are
    drawn.
    """
    domains = [list(groups) for _, groups in groupby(host.instances, key=lambda group: group.ild)]
    shown = _first_and_last(range(len(domains)), _MOST_DOMAINS)
    most = max(_FEWEST_INSTANCES, _MOST_INSTANCES // len(shown))
    first, inner = host.first_index, width - 2 * _INNER_PAD
    for position in shown:
        if position is None:
            left_out = domains[len(shown) - 2 : -1]
            where = f" in {numbered('IPU-Link domain', [groups[0].ild for groups in left_out])}"
            yield _likewise([g for groups in left_out for g in groups], width, where=where)
            continue
        groups = domains[position]
        numbers = _first_and_last(range(len(groups)), most)
        hidden = groups[len(numbers) - 2 : -1]
        drawn = [
            _likewise(hidden, inner) if number is None else _instance(groups[number], first, inner)
            for number in numbers
        ]
        heading = _domain_heading(topology, groups[0].ild, inner)
        yield framed(stacked([heading, *drawn], gap=_GAP), "domain", pad=_INNER_PAD, width=width)


def _likewise(hidden: Sequence[InstanceGroup], width: int, *, where: str = "") -> Block:
    indices = [index for group in hidden for index in group.indices]
    return paragraph(f"{numbered('instance', indices)} likewise{where}", "note", width)


def _domain_heading(topology: Topology, index: int, width: int) -> Block:
    hosts = {each.host_index for each in topology.instances if each.ild == index}
    names = [topology.hosts[host].name for host in sorted(hosts)]
    where = f" on {compress(names)}" if len(names) > 1 else ""
    blocks = [paragraph(f"IPU-Link domain {index}{where}", "name", width)]
    if topology.num_ilds > 1:
        size = topology.ipus_per_ild
        ipus = numbered("IPU", range(index * size, (index + 1) * size))
        blocks.append(paragraph(f"{ipus} of {topology.num_ipus}", "note", width))
    return stacked(blocks, gap=2)


def _instance(group: InstanceGroup, first: int, width: int) -> Block:
    is_single = len(group.indices) == 1
    kind = f"own{(group.indices[0] - first) % _COLOURS}" if is_single else "many"
    sign = cell(ranges_text(group.indices), kind, least=20, height=20)
    room = width - sign.width - _INNER_PAD
    title = f"{numbered('instance', group.indices)} ({numbered('replica', group.replicas)})"
    each = "" if is_single else f"; {counted(group.replicas_each, 'replica')} each"
    nodes = group.placement.numa_nodes
    parts = [
        paragraph(title, "name", room),
        paragraph(placement_text(group.placement) + each, "note", room),
        *([_alert(f"crosses {numbered('NUMA node', nodes)}", room)] if len(nodes) > 1 else []),
        _replicas(group, room),
    ]
    return beside([sign, stacked(parts, gap=3)], gap=_INNER_PAD)


def _replicas(group: InstanceGroup, width: int) -> Block:
    size = group.ipus_per_replica
    inner = width - 2 * 3
    frames = []
    for replica in _first_and_last(group.replicas, _MOST_REPLICAS):
        if replica is None:
            frames.append(_dots())
            continue
        start = group.ipus.start + (replica - group.replicas.start) * size
        ipus = [
            _dots() if ipu is None else described(cell(str(ipu), "ipu", height=15), f"IPU {ipu}")
            for ipu in _first_and_last(range(start, start + size), _MOST_IPUS)
        ]
        name = cell(f"R{replica}", height=15)
        frames.append(framed(flowing([name, *ipus], inner, gap=_CELL_GAP), "replica", pad=3))
    return flowing(frames, width, gap=4)


def _first_and_last(numbers: range, most: int) -> list[int | None]:
    """Return at most ``most`` of the ``numbers``, with None in place of numbers in the middle."""
    if len(numbers) <= most:
        return list(numbers)
    return [*numbers[: most - 2], None, numbers[-1]]


def _dots() -> Block:
    return cell("...", height=15)


def _alert(sentence: str, width: int) -> Block:
    return framed(paragraph(f"! {sentence}", "note", width - 2 * 4), "alert", pad=4)
