"""The subcommand ``poprun-py jobs``, which lists the jobs that run on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from poprun_py.command.click_commands import HELP, parse_words
from poprun_py.command.machine_jobs import MachineJob, jobs_of_machine
from poprun_py.display.formatting import number_text, ranges_text
from poprun_py.display.tables import Column, fitted_table, rich_lines
from poprun_py.terminal import can_print, print_out, wants_colour

_PIPE_WIDTH = 200
_DAY_SECONDS = 86_400
_VERSION = 1  # of the JSON document
_HELP: Final = """List the jobs that run on this machine, or wait for its cores.

The list has all of your own jobs, and the jobs of other users that hold cores or wait for cores.
The list shows the state, the instances, the step and the speed of your own jobs only. For the user
root, the list shows these values of all jobs.

\b
Examples:
  poprun-py jobs
  poprun-py jobs --format json
  poprun-py --status=NAME       show the instances of one job
  poprun-py stop NAME           end the job
"""
JOBS: Final = click.Command(
    "jobs",
    help=_HELP,
    add_help_option=False,
    params=[
        click.Option(
            ["--format", "form"],
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Output format of the list.",
        ),
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run ``poprun-py jobs`` with the arguments ``words`` and return the exit code.

    Raises:
        UsageError: An argument is not accepted.
    """
    values = parse_words(JOBS, words)
    if values is None:
        return 0
    jobs = jobs_of_machine()
    if values["form"] == "json":
        document = {"version": _VERSION, "jobs": [_json(job) for job in jobs]}
        print_out(json.dumps(document, indent=2))
        return 0
    if not jobs:
        print_out("no job runs on this machine")
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    text = "\n".join(job_lines(jobs, width=width, now=time.time(), colour=wants_colour()))
    print_out(text if can_print(text) else text.replace("─", "-"))
    return 0


def _json(job: MachineJob) -> dict[str, Any]:
    return {
        "run_id": job.run_id,
        "pid": job.pid,
        "user": job.user,
        "own": job.is_own,
        "program": job.program,
        "state": job.state or None,
        "num_instances": job.num_instances,
        "since": job.since,
        "cpus": list(job.cpus),
        "shared": job.is_shared,
        "step": job.step,
        "samples_per_second": job.samples_per_second,
    }


def job_lines(
    jobs: Sequence[MachineJob], *, width: int, now: float, colour: bool = False
) -> list[str]:
    """Return the table of jobs, without the columns that do not fit ``width`` characters."""

    def column(title: str, cells: Sequence[str], drop_order: int = 0, *, text: bool = True) -> Any:
        return Column(title, tuple(cells), drop_order=drop_order, is_text=text)

    columns = [
        column("run", [job.run_id or "-" for job in jobs]),
        column("user", [job.user for job in jobs], 7),
        column("pid", [str(job.pid) for job in jobs], text=False),
        column("program", [job.program or "-" for job in jobs], 5),
        column("state", [job.state or "-" for job in jobs], 6),
        column("instances", [_or_dash(job.num_instances) for job in jobs], 2, text=False),
        column("CPUs", [_cpus(job) for job in jobs], 3),
        column("since", [_since(job.since, now) for job in jobs], 4),
        column("step", [_or_dash(job.step) for job in jobs], 1, text=False),
        column("samples/s", [_speed(job.samples_per_second) for job in jobs], 1, text=False),
    ]
    return rich_lines(fitted_table(columns, width=width), width=width, colour=colour)


def _cpus(job: MachineJob) -> str:
    return f"{ranges_text(job.cpus)}{' (shared)' if job.is_shared else ''}" if job.cpus else "-"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _speed(value: float | None) -> str:
    return "-" if value is None else number_text(value)


def _since(since: float, now: float) -> str:
    form = "%H:%M:%S" if 0 <= now - since < _DAY_SECONDS else "%Y-%m-%d %H:%M"
    try:
        return time.strftime(form, time.localtime(since))
    except (ValueError, OverflowError, OSError):
        return "?"
