"""A plan as a page (HTML): its picture, its instances as a table, and the command to run it.

The page is one file that needs no network, for light and dark screens, telephones and paper. Only
text is made here. The pictures: plan_svg.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.page_look import PAGE_LOOK
from poprun_py.planning.views.plan_svg import headline, host_pictures, legend, like_the_first
from poprun_py.planning.views.plan_tree import (
    instances_of,
    runs_of_equal_hosts,
    runs_of_equal_instances,
)
from poprun_py.planning.views.svg import STYLE, escaped
from poprun_py.texts import ranges_text

_COLUMNS = (
    *("host", "instance", "NUMA nodes", "CPUs", "memory of nodes", "threads"),
    *("replicas", "IPUs", "IPU-Link domain"),
)


def plan_page(plan: LaunchPlan) -> str:
    """Return a plan as a whole HTML document, in ASCII, without a final newline.

    It is well-formed XML besides.
    """
    title = escaped(headline(plan))
    alerts = "".join(f"<li>{escaped(sentence)}</li>" for sentence in plan_warnings(plan))
    pictures = "\n".join(host_pictures(plan))
    forwarded = "<p>Values of --env are not shown: set these variables first.</p>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{STYLE}{PAGE_LOOK}</style>
</head>
<body>
<h1>{title}</h1>
{f'<ul class="alerts" aria-label="Warnings">{alerts}</ul>' if alerts else ""}
<div class="hosts">
{pictures}
</div>
<p>{escaped(legend(plan))}</p>
<h2>Instances</h2>
{plan_table(plan)}
<h2>Command</h2>
{forwarded if plan.config.env else ""}
<pre>{escaped(launch_command(plan.config))}</pre>
</body>
</html>"""


def plan_table(plan: LaunchPlan) -> str:
    """Return the instances as rows of HTML, of hosts that look alike those of the first."""
    names = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = [f"<tr>{names}</tr>"]
    for run in runs_of_equal_hosts(plan):
        name = plan.topology.hosts[run[0]].name
        for own in runs_of_equal_instances(instances_of(plan, run[0])):
            cells = "".join(f"<td>{escaped(text)}</td>" for text in _row(own))
            rows.append(f"<tr><td>{escaped(name)}</td>{cells}</tr>")
        if len(run) > 1:
            rest = escaped(like_the_first(plan, run))
            rows.append(f'<tr><td colspan="{len(_COLUMNS)}">{rest}</td></tr>')
    # Keys scroll what is wider than the screen only where it can be reached with them.
    return "\n".join(
        (
            '<div class="rows" tabindex="0" role="region" aria-label="Instances"><table>',
            *rows,
            "</table></div>",
        )
    )


def _row(run: Sequence[InstancePlan]) -> Iterator[str]:
    """Give the cells of neighbours on the same CPUs, nearly always one instance."""
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
