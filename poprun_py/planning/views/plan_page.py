"""A plan as an HTML page: pictures of its hosts, a table of its instances, and its command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poprun_py.html.page import Alert, Code, Drawings, Section, Sentence, Table, page
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.plan_svg import headline, host_pictures, legend, like_the_first
from poprun_py.planning.views.plan_tree import (
    instances_of,
    runs_of_equal_hosts,
    runs_of_equal_instances,
)
from poprun_py.planning.views.svg import STYLE
from poprun_py.texts import ranges_text

_COLUMNS = (
    *("host", "instance", "NUMA nodes", "CPUs", "memory of nodes", "threads"),
    *("replicas", "IPUs", "IPU-Link domain"),
)


def plan_page(plan: LaunchPlan) -> str:
    """Return a plan as an HTML document, in ASCII, without a final newline.

    The document is also well-formed XML.
    """
    hidden = Sentence("Values of --env are not shown: set these variables first.")
    command = Code(launch_command(plan.config))
    return page(
        headline(plan),
        [
            Section("Instances", [instances_table(plan)]),
            Section("Command", [hidden, command] if plan.config.env else [command]),
        ],
        opening=[
            *map(Alert, plan_warnings(plan)),
            Drawings(list(host_pictures(plan))),
            Sentence(legend(plan)),
        ],
        drawing_style=STYLE,
    )


def instances_table(plan: LaunchPlan) -> Table:
    """Return the table of the instances; of equal hosts it lists the instances of the first."""
    rows: list[tuple[str, ...]] = []
    for run in runs_of_equal_hosts(plan):
        name = plan.topology.hosts[run[0]].name
        for instances in runs_of_equal_instances(instances_of(plan, run[0])):
            rows.append((name, *_row(instances)))
        if len(run) > 1:
            rows.append((like_the_first(plan, run),))
    return Table("Instances", _COLUMNS, rows)


def _row(run: Sequence[InstancePlan]) -> Iterator[str]:
    """Yield the cells of consecutive instances on the same CPUs, nearly always one instance."""
    first, last = run[0].instance, run[-1].instance
    placement = run[0].placement
    yield ranges_text([each.instance.index for each in run])
    yield ranges_text(placement.numa_nodes) or "any"
    yield ranges_text(placement.cpus) or "any"
    yield ranges_text(placement.memory_nodes) or "any"
    yield f"{placement.threads or 'unset'}{' each' if len(run) > 1 else ''}"
    yield ranges_text(range(first.replicas.start, last.replicas.stop))
    yield ranges_text(range(first.ipus.start, last.ipus.stop))
    yield str(first.ild)
