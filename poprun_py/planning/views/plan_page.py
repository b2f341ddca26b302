"""A plan as an HTML page with pictures of the hosts, a table of the instances, and the command."""

from __future__ import annotations

from poprun_py.display.page import Alert, Code, Section, Sentence, Table, page
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.plan_svg import host_pictures, legend
from poprun_py.planning.views.plan_tree import COLUMNS, PlanTree, instance_rows, plan_tree


def plan_page(plan: LaunchPlan) -> str:
    """Return a plan as an HTML page, in ASCII, without a final newline.

    The page is also well-formed XML.
    """
    tree = plan_tree(plan)
    hidden = Sentence("Values of --env are not shown: set these variables first.")
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
    """Return a table with the CPUs, replicas and IPUs of each instance."""
    return Table("Instances", COLUMNS, instance_rows(tree))
