"""A plan as one picture (SVG): hosts, NUMA nodes and cores, and whose they are; replicas and IPUs.

Every host is a card, one card for hosts that look alike. Only text is made here: a plan in, SVG
out. How blocks are drawn and arranged: svg.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.topology import Topology
from poprun_py.planning.views.host_tables import machine_summary
from poprun_py.planning.views.placement_picture import LEGEND, CoreMarks, placement_line
from poprun_py.planning.views.plan_text import topology_tree
from poprun_py.planning.views.plan_tree import (
    instances_of,
    others,
    runs_of_equal_hosts,
    runs_of_equal_instances,
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
from poprun_py.texts import bytes_text, numbered, ranges_text

# A card fits on the screen of a telephone; so many of them are side by side.
_CARD, _MOST_COLUMNS = 368, 3
_PAD, _INNER_PAD, _GAP, _CELL_GAP, _CACHE_GAP = 12, 7, 10, 2, 5
_THREAD_HEIGHT = 12
# Behind the card of equal hosts the edges of two more are seen, so many pixels further.
_EDGE = 4
_COLOURS = 8
_CLASSES = {".": "idle", "x": "closed", "*": "many"}
# NUMA nodes of so few cores stand two in a row.
_MOST_IN_HALF = 8
# Of more of them only the first and the last are drawn; domains share the instances of a host.
_MOST_DOMAINS, _MOST_INSTANCES, _MOST_REPLICAS, _MOST_IPUS = 4, 12, 8, 8
_FEWEST_INSTANCES = 3


def plan_picture(plan: LaunchPlan) -> str:
    """Return the picture of a plan as a whole SVG document, in ASCII, without a final newline.

    It has the colours of a light or a dark page, as the reader prefers, and says all of it in words
    too.
    """
    runs = list(runs_of_equal_hosts(plan))
    cards = [_card(plan, run, is_wide=len(runs) == 1) for run in runs]
    widest = max(card.width for card in cards)
    # Four are a square: the POD256, domain by domain.
    columns = 2 if len(cards) == 4 else min(len(cards), _MOST_COLUMNS)
    width = columns * (widest + _GAP) - _GAP
    title = headline(plan)
    warnings = [_alert(sentence, width) for sentence in plan_warnings(plan)]
    parts = [
        paragraph(title, "title", width),
        *warnings,
        flowing(cards, width, gap=_GAP),
        paragraph(legend(plan), "note", width),
    ]
    page = framed(stacked(parts, gap=_GAP), "page", pad=_PAD, width=width + 2 * _PAD)
    facts = (
        line.lstrip(" |`-") for line in topology_tree(plan, TextStyle(box_lines=False)).split("\n")
    )
    return document(page, title=title, description="; ".join(facts), style=STYLE)


def host_pictures(plan: LaunchPlan) -> Iterator[str]:
    """Give the picture of each host, or of hosts that look alike; a page holds their style."""
    for run in runs_of_equal_hosts(plan):
        names = compress([plan.topology.hosts[host].name for host in run])
        yield document(_card(plan, run), title=f"Cores, instances and IPUs of {names}")


def headline(plan: LaunchPlan) -> str:
    """Return a plan in numbers: ``2 instances, 8 replicas, 8 IPUs on localhost``."""
    topology = plan.topology
    domains = f" in {topology.num_ilds} IPU-Link domains" if topology.num_ilds > 1 else ""
    hosts = topology.hosts
    where = hosts[0].name if len(hosts) == 1 else f"{len(hosts)} hosts"
    return (
        f"{counted(topology.num_instances, 'instance')}, "
        f"{counted(topology.num_replicas, 'replica')}, "
        f"{counted(topology.num_ipus, 'IPU')}{domains} on {where}"
    )


def legend(plan: LaunchPlan) -> str:
    """Return what the signs in the pictures of a plan mean; only of those that are there."""
    drawn = [
        (machine, _marks(machine, instances_of(plan, run[0])))
        for run in runs_of_equal_hosts(plan)
        if (machine := plan.machines[run[0]]) is not None
    ]
    cores = [(core, marks) for machine, marks in drawn for core in machine.cores]
    labels = "".join(marks.of(part) for core, marks in cores for part in _threads(core))
    has_threads = any(len(core.cpus) > 1 for core, _ in cores)
    signs = [
        *(["a cell is a core with the index of its instance"] if cores else []),
        *(["notches: its hardware threads"] if has_threads else []),
        *(["wider gap: another L3 cache"] if any(_has_gaps(m) for m, _ in drawn) else []),
        *(f"{mark} {text}" for mark, text in LEGEND.items() if mark in labels),
        "R: a replica with its IPUs",
    ]
    text = "; ".join(signs)
    return f"{text[0].upper()}{text[1:]}."


def _has_gaps(machine: Machine) -> bool:
    """Tell whether a NUMA node has several L3 caches."""
    caches = {(core.numa_node, core.package, core.l3) for core in machine.cores}
    return len(caches) > len({node for node, _, _ in caches})


def like_the_first(plan: LaunchPlan, run: range) -> str:
    """Return the line that stands for all hosts of a run but the first."""
    rest = others(plan, run, domain="IPU-Link domain")
    return f"{rest.name}: {rest.details}"


# --- a host -------------------------------------------------------------------------------------


def _card(plan: LaunchPlan, run: range, *, is_wide: bool = False) -> Block:
    """Draw the first of hosts that look alike, and say which they are.

    Its instances are below its cores, or beside them where there is room.
    """
    machine, mine = plan.machines[run[0]], instances_of(plan, run[0])
    width = _CARD - 2 * _PAD
    name = plan.topology.hosts[run[0]].name
    title = name if len(run) == 1 else f"{name}, and {len(run) - 1} like it"
    facts = machine_summary(machine) if machine is not None else ["unknown machine"]
    if len(run) > 1:
        facts.append(like_the_first(plan, run))
    heading = [paragraph(title, "title", width), *(paragraph(f, "note", width) for f in facts)]
    nodes = [_nodes(machine, mine, width)] if machine is not None else []
    hardware = stacked([stacked(heading, gap=2), *nodes], gap=_GAP)
    owners = stacked(_instances(plan, mine, width), gap=_GAP)
    both = (beside if is_wide else stacked)([hardware, owners], gap=_GAP)
    card = framed(both, "card", pad=_PAD, width=_CARD)
    return _piled(card) if len(run) > 1 else card


def _piled(card: Block) -> Block:
    """Draw a card on top of others."""
    edges = "".join(
        f'<rect class="card" x="{_EDGE * n}" y="{_EDGE * n}" width="{card.width}" '
        f'height="{card.height}" rx="4"/>'
        for n in (2, 1)
    )
    return Block(card.width + 2 * _EDGE, card.height + 2 * _EDGE, f"{edges}{card.body}")


def _nodes(machine: Machine, mine: Sequence[InstancePlan], width: int) -> Block:
    """Draw the NUMA nodes, two beside each other where their cores leave room for that."""
    first = mine[0].instance.index
    marks = _marks(machine, mine)
    sizes = [sum(c.numa_node == n.index for c in machine.cores) for n in machine.numa_nodes]
    is_half = len(sizes) > 1 and max(sizes) <= _MOST_IN_HALF
    own = (width - _INNER_PAD) // 2 if is_half else width
    nodes = [_node(machine, node, marks, first, own) for node in machine.numa_nodes]
    return flowing(nodes, width, gap=_INNER_PAD)


def _node(machine: Machine, node: NumaNode, marks: CoreMarks, first: int, width: int) -> Block:
    """Draw a NUMA node with a cell for each core; caches are further apart than cores."""
    inner = width - 2 * _INNER_PAD
    own = [core for core in machine.cores if core.numa_node == node.index]
    caches = [
        flowing((_core(core, marks, first) for core in cores), inner, gap=_CELL_GAP)
        for _, cores in groupby(own, key=lambda core: (core.package, core.l3))
    ]
    parts = [*_node_title(node, inner), flowing(caches, inner, gap=_CACHE_GAP)]
    return framed(stacked(parts, gap=4), "node", pad=_INNER_PAD, width=width)


def _node_title(node: NumaNode, width: int) -> Iterator[Block]:
    cpus = numbered("CPU", node.cpus) if node.cpus else "memory only"
    memory = f"; {bytes_text(node.memory_bytes)}" if node.memory_bytes else ""
    yield paragraph(f"NUMA node {node.index}", "name", width)
    yield paragraph(f"{cpus}{memory}", "note", width)


def _marks(machine: Machine, mine: Sequence[InstancePlan]) -> CoreMarks:
    return CoreMarks(machine, {each.instance.index: each.placement for each in mine})


def _threads(core: Core) -> list[Core]:
    """Return the hardware threads of a core, each as if it were one."""
    return [replace(core, cpus=(cpu,)) for cpu in core.cpus]


def _core(core: Core, marks: CoreMarks, first: int) -> Block:
    """Draw a core: one cell, or one for each hardware thread where their instances differ."""
    labels = [marks.of(thread) for thread in _threads(core)]
    widest = max(labels, key=len)
    if len(set(labels)) == 1:
        height = max(17, _THREAD_HEIGHT * len(labels))
        drawn = _owned(widest, first, height=height, notches=len(labels) - 1)
    else:
        least = _owned(widest, first, height=_THREAD_HEIGHT).width
        threads = (_owned(label, first, height=_THREAD_HEIGHT, least=least) for label in labels)
        drawn = stacked(threads, gap=1)
    signs = dict.fromkeys(_sign(label) for label in labels)
    said = ", ".join(LEGEND.get(sign, f"instance {sign}") for sign in signs)
    return described(drawn, f"{numbered('CPU', core.cpus)}: {said}")


def _sign(label: str) -> str:
    """Return whose a core is, without its speed."""
    return label.rstrip("'")


def _owned(label: str, first: int, *, height: int, notches: int = 0, least: int = 17) -> Block:
    """Draw a cell in the colours of the instances that its label names."""
    sign = _sign(label)
    kinds = [_CLASSES[sign]] if sign in _CLASSES else [
        f"own{(int(index) - first) % _COLOURS}" for index in sign.split("/")
    ]  # fmt: skip
    return cell(label, *kinds, height=height, notches=notches, least=least)


# --- instances ----------------------------------------------------------------------------------


def _instances(plan: LaunchPlan, mine: Sequence[InstancePlan], width: int) -> Iterator[Block]:
    """Draw the instances of a host in their IPU-Link domains; of very many the first and last."""
    runs = runs_of_equal_instances(mine)
    members = [list(own) for _, own in groupby(runs, key=lambda run: run[0].instance.ild)]
    shown = _first_and_last(range(len(members)), _MOST_DOMAINS)
    most = max(_FEWEST_INSTANCES, _MOST_INSTANCES // len(shown))
    first, inner = mine[0].instance.index, width - 2 * _INNER_PAD
    for position in shown:
        if position is None:
            left_out = members[len(shown) - 2 : -1]
            domains = [own[0][0].instance.ild for own in left_out]
            where = f" in {numbered('IPU-Link domain', domains)}"
            yield _likewise([run for own in left_out for run in own], width, where=where)
            continue
        own = members[position]
        numbers = _first_and_last(range(len(own)), most)
        hidden = own[len(numbers) - 2 : -1]
        drawn = [
            _likewise(hidden, inner) if number is None else _instance(own[number], first, inner)
            for number in numbers
        ]
        heading = _domain_heading(plan.topology, own[0][0].instance.ild, inner)
        yield framed(stacked([heading, *drawn], gap=_GAP), "domain", pad=_INNER_PAD, width=width)


def _likewise(hidden: Sequence[Sequence[InstancePlan]], width: int, *, where: str = "") -> Block:
    """Name the instances that are not drawn."""
    indices = [each.instance.index for run in hidden for each in run]
    return paragraph(f"{numbered('instance', indices)} likewise{where}", "note", width)


def _domain_heading(topology: Topology, domain: int, width: int) -> Block:
    """Name a domain, with its hosts where they are several, and its IPUs where it is not alone."""
    share, size = topology.num_instances // topology.num_ilds, topology.ipus_per_ild
    hosts = {
        topology.hosts[each.host_index].name: None
        for each in topology.instances[domain * share : (domain + 1) * share]
    }
    where = f" on {compress(list(hosts))}" if len(hosts) > 1 else ""
    ipus = numbered("IPU", range(domain * size, (domain + 1) * size))
    notes = [f"{ipus} of {topology.num_ipus}"] if topology.num_ilds > 1 else []
    title = paragraph(f"IPU-Link domain {domain}{where}", "name", width)
    return stacked([title, *(paragraph(note, "note", width) for note in notes)], gap=2)


def _instance(run: Sequence[InstancePlan], first: int, width: int) -> Block:
    """Draw neighbours on the same CPUs, nearly always one instance: its place and its replicas."""
    placement = run[0].placement
    indices = [each.instance.index for each in run]
    label = ranges_text(indices)
    kind = "many" if len(run) > 1 else f"own{(indices[0] - first) % _COLOURS}"
    sign = cell(label, kind, least=20, height=20)
    room = width - sign.width - _INNER_PAD
    own = run[0].instance.replicas
    replicas = range(own.start, run[-1].instance.replicas.stop)
    each = f"; {counted(len(own), 'replica')} each" if len(run) > 1 else ""
    nodes = placement.numa_nodes
    parts = [
        paragraph(
            f"{numbered('instance', indices)} ({numbered('replica', replicas)})", "name", room
        ),
        paragraph(placement_line(placement) + each, "note", room),
        *([_alert(f"crosses {numbered('NUMA node', nodes)}", room)] if len(nodes) > 1 else []),
        _replicas(run, replicas, room),
    ]
    return beside([sign, stacked(parts, gap=3)], gap=_INNER_PAD)


def _replicas(run: Sequence[InstancePlan], replicas: range, width: int) -> Block:
    """Draw the replicas of instances, each a frame around its IPUs."""
    first = run[0].instance
    size = len(first.ipus) // len(first.replicas)
    inner = width - 2 * 3
    frames = []
    for replica in _first_and_last(replicas, _MOST_REPLICAS):
        if replica is None:
            frames.append(_dots())
            continue
        start = first.ipus.start + (replica - first.replicas.start) * size
        ipus = [
            _dots() if ipu is None else described(cell(str(ipu), "ipu", height=15), f"IPU {ipu}")
            for ipu in _first_and_last(range(start, start + size), _MOST_IPUS)
        ]
        name = cell(f"R{replica}", height=15)
        frames.append(framed(flowing([name, *ipus], inner, gap=_CELL_GAP), "replica", pad=3))
    return flowing(frames, width, gap=4)


def _first_and_last(numbers: range, most: int) -> list[int | None]:
    """Return the numbers, or of too many the first ones, None and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [*numbers[: most - 2], None, numbers[-1]]


def _dots() -> Block:
    return cell("...", height=15)


def _alert(sentence: str, width: int) -> Block:
    """Draw what the reader should notice."""
    return framed(paragraph(f"! {sentence}", "note", width - 2 * 4), "alert", pad=4)
