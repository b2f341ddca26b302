"""Text and HTML of the values of the Python API.

display/public_values.py calls ``text_of``, ``html_of`` and ``summary_of`` to show a value. The
functions that show results are in result_views.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from popdist_py.errors import counted
from poprun_py.display.page import Cell, Code, Details, Part, Sentence, Table, fragment
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import option_name
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.plan_page import instances_table
from poprun_py.planning.views.plan_svg import host_pictures, legend
from poprun_py.planning.views.plan_text import tree_text
from poprun_py.planning.views.plan_tree import plan_tree
from poprun_py.planning.views.text_drawing import TextStyle
from poprun_py.python_api import result_views as results
from poprun_py.python_api.status import JobStatus
from poprun_py.running.supervise.job import InstanceResult, LaunchResult
from poprun_py.running.watch.job_view import COLUMNS, JobView, headline, row_of, table_lines

_DEFAULT_WIDTH = 100
# The most rows of a table. The table of a larger job shows the instances with the longest steps.
_MOST_ROWS = 64

summary_of = results.summary_of


def text_of(value: object) -> str:
    """Return ``str(value)``."""
    return _TEXT_FUNCTIONS[type(value)](value)


def html_of(value: object) -> str:
    """Return the HTML of a value as a fragment that does not need other files."""
    return _HTML_FUNCTIONS[type(value)](value)


# --- text and HTML of configurations and plans ------------------------------------------------


def _config_html(config: LaunchConfig) -> str:
    """Return HTML with the command, and a table of the given options and their sources."""
    rows = [
        (option_name(name), _option_value(config, name), config.origin(name).label)
        for name, opt in OPTIONS.items()
        if config.is_given(name) and opt.saved
    ]
    options_given = Table("Options", ("option", "value", "given in"), rows)
    return fragment(
        "LaunchConfig",
        [
            Code(launch_command(config)),
            options_given if rows else Sentence("every option: its default"),
        ],
    )


def _option_value(config: LaunchConfig, name: str) -> str:
    value = getattr(config, name)
    if OPTIONS[name].secret:
        # The values of these environment variables may be secret, so only their names are shown.
        return ", ".join(each.partition("=")[0] for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "all" if value is None else str(value)


def _plan_text(plan: LaunchPlan) -> str:
    """Return the number of instances and replicas, the tree of hosts, and the warnings."""
    columns = shutil.get_terminal_size((0, 0)).columns
    warnings = [f"warning: {sentence}" for sentence in plan_warnings(plan)]
    tree = plan_tree(plan)
    text = tree_text(tree, TextStyle(width=columns or None))
    return "\n".join((tree.headline, text, *warnings))


def _plan_html(plan: LaunchPlan) -> str:
    """Return HTML with a picture of each host, a table of the instances, and the command."""
    tree = plan_tree(plan)
    return fragment(
        tree.headline,
        [
            *(Sentence(f"! {sentence}", "warn") for sentence in plan_warnings(plan)),
            host_pictures(tree),
            Sentence(legend(tree)),
            Details("instances", [instances_table(tree)]),
            Details("command", [Code(launch_command(plan.config))]),
        ],
    )


# --- text and HTML of running jobs ------------------------------------------------------------


def _view_text(view: JobView) -> str:
    width = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    return "\n".join(table_lines(view, width=width))


def _view_html(view: JobView) -> str:
    return fragment(headline(view)[0], _view_parts(view))


def _status_html(status: JobStatus) -> str:
    return fragment(str(status), status_parts(status))


def status_parts(status: JobStatus) -> list[Part]:
    """Return parts of an HTML page that show the instances of a running job."""
    return [] if status.view is None else _view_parts(status.view)


def _view_parts(view: JobView) -> list[Part]:
    """Return the table of the instances, and a note about the slowest instance.

    Bars in the table compare the instances' numbers of steps. The row of a slow instance is marked.
    """
    states = view.instances
    if len(states) > _MOST_ROWS:
        longest = sorted(states, key=lambda state: -state.own_seconds)[:_MOST_ROWS]
        states = tuple(sorted(longest, key=lambda state: state.index))
    most_steps = max((state.step or 0 for state in view.instances), default=0)
    rows, marked = [], set()
    for number, state in enumerate(states):
        if view.worst is not None and view.worst.is_slow and state.index == view.worst.instance:
            marked.add(number)
        share = (state.step or 0) / most_steps if most_steps else None
        rows.append(
            [
                Cell(text, share=share) if name == "step" else text
                for name, text in zip(COLUMNS, row_of(state), strict=True)
            ]
        )
    hidden = len(view.instances) - len(states)
    notes = [f"and {counted(hidden, 'more instance')}"] if hidden else []
    table = Table("Instances", COLUMNS, rows, frozenset(marked))
    return [table, *map(Sentence, (*notes, *headline(view)[1:]))]


_TEXT_FUNCTIONS: dict[type, Callable[..., str]] = {
    LaunchConfig: launch_command,
    LaunchPlan: _plan_text,
    LaunchResult: results.result_text,
    InstanceResult: results.instance_text,
    JobView: _view_text,
}
_HTML_FUNCTIONS: dict[type, Callable[..., str]] = {
    LaunchConfig: _config_html,
    LaunchPlan: _plan_html,
    LaunchResult: results.result_html,
    InstanceResult: results.instance_html,
    JobView: _view_html,
    JobStatus: _status_html,
}
