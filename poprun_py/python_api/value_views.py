"""Text and HTML of the values of the Python API.

display/public_values.py calls ``text_of``, ``html_of`` and ``summary_of`` to show a value. A
JobHandle calls ``job_html`` and ``show_cell`` to show a job in a notebook.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from popdist_py.environment import RESUME_EXIT_CODE
from popdist_py.errors import counted
from popdist_py.html_pages.page import Cell, Code, Details, Part, Sentence, Table, fragment
from poprun_py.display.formatting import bytes_text
from poprun_py.launching.failure_report import (
    diagnosis,
    report_text,
    stderr_excerpt,
    traceback_of,
)
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.given_options import typed_values
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import option_name
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.views.command_text import launch_command
from poprun_py.planning.views.plan_pictures import host_pictures, instances_table, legend
from poprun_py.planning.views.plan_text import tree_text
from poprun_py.planning.views.plan_tree import plan_tree
from poprun_py.planning.views.text_drawing import TextStyle
from poprun_py.python_api.status import JobStatus
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult, describe
from poprun_py.running.watch.job_view import COLUMNS, JobView, headline, row_of, table_lines

_DEFAULT_WIDTH = 100
# The greatest number of rows in a table of instances.
_MOST_ROWS = 64
_RESULT_COLUMNS = ("instance", "host", "PID", "how it ended", "steps", "peak memory")
# The time between two updates of a notebook cell, in seconds.
_UPDATE_SECONDS = 0.5

_Outcome = futures.Future[LaunchResult]


def text_of(value: object) -> str:
    """Return ``str(value)``."""
    return _TEXT_FUNCTIONS[type(value)](value)


def html_of(value: object) -> str:
    """Return the HTML of a value as a fragment that does not need other files."""
    return _HTML_FUNCTIONS[type(value)](value)


# --- text and HTML of configurations and plans ------------------------------------------------


def _config_html(config: LaunchConfig) -> str:
    """Return a configuration as HTML: the command, and a table of the given options."""
    rows = [
        (option_name(name), ", ".join(typed_values(config, name)), config.origin(name).label)
        for name, opt in OPTIONS.items()
        if config.is_given(name) and opt.saved
    ]
    options_given = Table("Options", ("option", "value", "given in"), rows)
    return fragment(
        "LaunchConfig",
        [
            Code(launch_command(config)),
            options_given if rows else Sentence("all options have their default values"),
        ],
    )


def _plan_text(plan: LaunchPlan) -> str:
    """Return a plan as text: the numbers of instances and replicas, the hosts, and the warnings."""
    columns = shutil.get_terminal_size((0, 0)).columns
    warnings = [f"warning: {sentence}" for sentence in plan_warnings(plan)]
    tree = plan_tree(plan)
    text = tree_text(tree, TextStyle(width=columns or None))
    return "\n".join((tree.headline, text, *warnings))


def _plan_html(plan: LaunchPlan) -> str:
    """Return a plan as HTML: pictures of the hosts, a table of the instances, and the command."""
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


# --- text and HTML of results ------------------------------------------------------------------


def _result_text(result: LaunchResult) -> str:
    """Return one sentence, or the report that ``poprun-py`` prints if the job failed."""
    if result.exit_code == 0:
        return summary_of(result)
    # A user who prints the result may not have seen stderr, so the report repeats its last lines.
    return report_text(result, _label, repeats_stderr=True).rstrip("\n") or summary_of(result)


def summary_of(result: LaunchResult) -> str:
    """Return one sentence that says how a job ended."""
    after = f" after {result.seconds:.1f} s" if result.seconds else ""
    instances = counted(len(result.instances), "instance")
    if result.exit_code == 0:
        restarts = f", {counted(result.restart_count, 'restart')}" if result.restart_count else ""
        run = f" (run {result.run_id})" if result.run_id else ""
        return f"{instances} ended well{after}{restarts}{run}"
    if result.exit_code == RESUME_EXIT_CODE:
        return f"{instances} stopped at a checkpoint{after}: launch the job again to continue"
    if result.first_failure is not None and not (result.timed_out or result.hung):
        return _instance_text(result.first_failure, verb="failed first")
    code = result.exit_code
    # As in a shell, the exit code of a job that a signal ended is 128 plus the signal's number.
    reason = result.explanation or describe(128 - code if 128 < code < 192 else code)
    return f"the job ended{after}: {reason}"


def _result_html(result: LaunchResult) -> str:
    """Return HTML with the summary of a result and a table of its instances."""
    return fragment(summary_of(result), _result_parts(result), kind=_kind(result.exit_code))


def _result_parts(result: LaunchResult) -> list[Part]:
    first = result.first_failure
    parts: list[Part] = []
    if first is not None:
        parts += [Sentence(text) for text in (diagnosis(first), result.advice) if text]
        if excerpt := stderr_excerpt(first.stderr_tail):
            parts += [Sentence("the end of the stderr of this instance:"), Code("\n".join(excerpt))]
    if result.instances:
        shown = result.instances[:_MOST_ROWS]
        marked = [n for n, each in enumerate(shown) if first and each.index == first.index]
        table = _instances_table(
            _RESULT_COLUMNS, list(map(_result_row, shown)), marked, len(result.instances)
        )
        parts += [Details("instances", table)] if result.exit_code == 0 else table
    for group in result.stacks:
        if group.has_stack:
            indices = ", ".join(map(str, group.instances))
            parts.append(Details(f"call stack of instance {indices}", [Code(group.text)]))
    return parts


def _instances_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    marked: Sequence[int],
    num_instances: int,
) -> list[Part]:
    """Return a table of instances, and a sentence about the instances that the table omits."""
    parts: list[Part] = [Table("Instances", columns, rows, frozenset(marked))]
    if hidden := num_instances - len(rows):
        parts.append(Sentence(f"and {counted(hidden, 'more instance')}"))
    return parts


def _instance_text(result: InstanceResult, *, verb: str = "") -> str:
    """Return how an instance ended: ``instance 1 on h: exit code 3 (ValueError: no)``."""
    where = f"on {result.host}" if result.host else ""
    ended = " ".join(part for part in (_label(result.index), where, verb) if part)
    last = traceback_of(result.stderr_tail).rpartition("\n")[2].strip() if result.failed else ""
    why = last or (diagnosis(result) if result.failed else "")
    return f"{ended}: {_end(result)}{f' ({why})' if why else ''}"


def _instance_html(result: InstanceResult) -> str:
    """Return HTML about one instance: a table row, and the end of its stderr if it failed."""
    parts: list[Part] = [Table("Instance", _RESULT_COLUMNS, [_result_row(result)])]
    if result.failed and (excerpt := stderr_excerpt(result.stderr_tail)):
        parts.append(Code("\n".join(excerpt)))
    return fragment(_instance_text(result), parts, kind="bad" if result.failed else "")


def _kind(exit_code: int) -> str:
    return "good" if exit_code == 0 else "bad"


def _label(index: int) -> str:
    return f"instance {index}"


def _end(result: InstanceResult) -> str:
    if result.code is None:
        return "the instance never reported its end"
    if result.code == RESUME_EXIT_CODE:
        return "stopped at a checkpoint"
    how = "ended well" if result.code == 0 else describe(result.code)
    return f"stopped, {how}" if result.was_stopped and result.code != 0 else how


def _result_row(result: InstanceResult) -> list[Cell | str]:
    kind = "bad" if result.failed else "good" if result.code == 0 else "warn"
    memory = bytes_text(result.max_rss_bytes) if result.max_rss_bytes else ""
    return [
        str(result.index),
        result.host,
        str(result.pid or ""),
        Cell(_end(result), kind),
        "" if result.step is None else str(result.step),
        memory,
    ]


# --- text and HTML of running jobs ------------------------------------------------------------


def _view_text(view: JobView) -> str:
    width = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    return "\n".join(table_lines(view, width=width))


def _status_parts(status: JobStatus) -> list[Part]:
    return [] if status.view is None else _view_parts(status.view)


def _view_parts(view: JobView) -> list[Part]:
    """Return the table of a running job's instances, and a note about the slowest instance.

    If the job has more than 64 instances, the table shows those with the longest steps. Bars in the
    table compare the instances' numbers of steps. The row of a slow instance is marked.
    """
    shown = view.instances
    if len(shown) > _MOST_ROWS:
        longest = sorted(shown, key=lambda state: -state.own_seconds)[:_MOST_ROWS]
        shown = tuple(sorted(longest, key=lambda state: state.index))
    slow = view.worst.instance if view.worst is not None and view.worst.is_slow else None
    most_steps = max((state.step or 0 for state in view.instances), default=0)
    rows = []
    for state in shown:
        share = (state.step or 0) / most_steps if most_steps else None
        rows.append(
            [
                Cell(text, share=share) if name == "step" else text
                for name, text in zip(COLUMNS, row_of(state), strict=True)
            ]
        )
    marked = [number for number, state in enumerate(shown) if state.index == slow]
    table = _instances_table(COLUMNS, rows, marked, len(view.instances))
    return [*table, *map(Sentence, headline(view)[1:])]


def job_html(name: str, status: JobStatus, outcome: _Outcome) -> str:
    """Return HTML that shows a running job's instances, or an ended job's result or error."""
    heading = f"{name}: {status}"
    if status.exit_code is None:
        kind = "warn" if status.state != "running" else ""
        return fragment(heading, _status_parts(status), kind=kind)
    error = outcome.exception()
    result = outcome.result() if error is None else getattr(error, "result", None)
    parts: list[Part] = [Sentence(str(error))]
    if isinstance(result, LaunchResult):
        summary = Sentence(summary_of(result), _kind(result.exit_code))
        parts = [summary, *_result_parts(result)]
    return fragment(heading, parts, kind=_kind(status.exit_code))


def show_cell(name: str, get_status: Callable[[], JobStatus], outcome: _Outcome) -> None:
    """Show a job in a notebook cell, and update the cell until the job has ended."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    def content() -> dict[str, str]:
        status = get_status()
        return {
            "text/plain": f"<JobHandle {name}: {status}>",
            "text/html": job_html(name, status, outcome),
        }

    def update_to_end() -> None:
        while not outcome.done():
            futures.wait([outcome], _UPDATE_SECONDS)
            cell.update(content(), raw=True)

    show: Any = display  # IPython has no type annotations
    cell = show(content(), raw=True, display_id=True)
    # In a terminal, each update of the cell would print another line.
    is_notebook = cell is not None and hasattr(get_ipython(), "kernel")
    if is_notebook and not outcome.done():
        threading.Thread(target=update_to_end, name=f"poprun_py cell {name}", daemon=True).start()


_TEXT_FUNCTIONS: dict[type, Callable[..., str]] = {
    LaunchConfig: launch_command,
    LaunchPlan: _plan_text,
    LaunchResult: _result_text,
    InstanceResult: _instance_text,
    JobView: _view_text,
}
_HTML_FUNCTIONS: dict[type, Callable[..., str]] = {
    LaunchConfig: _config_html,
    LaunchPlan: _plan_html,
    LaunchResult: _result_html,
    InstanceResult: _instance_html,
    JobView: lambda view: fragment(headline(view)[0], _view_parts(view)),
    JobStatus: lambda status: fragment(str(status), _status_parts(status)),
}
