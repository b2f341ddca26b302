"""A plan for people: the tree of who runs where, and the picture and table of a notebook."""

from __future__ import annotations

import re
import shutil

from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.plan_page import plan_table
from poprun_py.planning.views.plan_svg import headline, host_pictures, legend
from poprun_py.planning.views.plan_text import topology_tree
from poprun_py.planning.views.svg import STYLE
from poprun_py.planning.views.text_drawing import TextStyle
from poprun_py.python_api.views.frame import block, details, framed, heading, note

# The classes of a picture, whose names other pages may use as well.
_CLASS = re.compile(r"\.([a-z]\w*)\{")
_PICTURE_LOOK = (
    _CLASS.sub(r".poprun-py .\1{", STYLE)
    + ".poprun-py .pp-hosts{display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start}"
    ".poprun-py .pp-hosts svg{display:block;max-width:100%;height:auto}"
)


def plan_text(plan: LaunchPlan) -> str:
    """Return a line in numbers, the tree that --print-topology=tree draws, and what to notice."""
    columns = shutil.get_terminal_size((0, 0)).columns
    warnings = [f"warning: {sentence}" for sentence in plan_warnings(plan)]
    tree = topology_tree(plan, TextStyle(width=columns or None))
    return "\n".join((headline(plan), tree, *warnings))


def plan_html(plan: LaunchPlan) -> str:
    """Return the picture of each host, with the table of the instances and the command."""
    pictures = "\n".join(host_pictures(plan))
    return framed(
        heading(headline(plan)),
        *(note(f"! {sentence}", "warn") for sentence in plan_warnings(plan)),
        f'<div class="pp-hosts">\n{pictures}\n</div>',
        note(legend(plan)),
        details("instances", plan_table(plan).replace('class="rows"', 'class="pp-rows"')),
        details("command", block(launch_command(plan.config))),
        style=_PICTURE_LOOK,
    )
