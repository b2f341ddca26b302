"""The subcommand ``poprun-py runs``, which lists the runs in a folder and removes old ones."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from popdist_py.errors import are, counted
from poprun_py.command.click_commands import FORMAT, HELP, parse_words, usage_errors
from poprun_py.command.named_runs import output_dir_option
from poprun_py.display.formatting import bytes_text
from poprun_py.errors import UsageError
from poprun_py.past_runs.listing.run_filter import RunFilter, parse_age, parse_since
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import (
    RunSummary,
    read_summaries,
    unreadable_folders,
)
from poprun_py.past_runs.run_files import DEFAULT_PARENT
from poprun_py.terminal import (
    can_print,
    command_name,
    flush_stdout,
    print_error,
    print_out,
    print_warning,
    wants_colour,
)

_PIPE_WIDTH: Final = 200
# The number of runs that a terminal shows without --limit.
_TERMINAL_RUNS: Final = 30
_JSON_VERSION: Final = 1
_HELP: Final = """List the recorded runs in DIR, the newest first, with their state, start,
duration, speed, loss, exit code and tags.

DIR is the folder that contains the runs. By default, DIR is the output_dir option from
POPRUN_OUTPUT_DIR or pyproject.toml. Without this option, DIR is the current folder, or its
subfolder runs if only that subfolder contains runs. A run's state is running, finished (exit code
0), failed, interrupted (by a signal, or at a checkpoint), lost (its launcher was killed) or unknown
(the run is of another host, or damaged).

--remove-older lists the folders of runs that ended long ago, asks, and removes these folders. Runs
in the state running, links and folders without a run are kept. Runs in the state unknown are
removed only with --state unknown.

\b
Examples:
  poprun-py runs                                    list the runs
  poprun-py runs --state failed --since 2d          failed runs of the last two days
  poprun-py runs --tag lr=0.1 --name 'small-*'      runs with this tag and name
  poprun-py runs --format json --limit 1            the newest run, for a script
  poprun-py runs --remove-older 30d --state failed  clean up
"""
RUNS: Final = click.Command(
    "runs",
    help=_HELP,
    add_help_option=False,
    params=[
        click.Argument(["parent"], metavar="[DIR]", required=False),
        click.Option(
            ["--state", "states"],
            type=click.Choice([str(state) for state in RunState]),
            multiple=True,
            help="List only runs in this state. --state may be repeated.",
        ),
        click.Option(
            ["--tag", "tags"],
            metavar="KEY[=VALUE]",
            multiple=True,
            help="List only runs with this tag. VALUE may be a pattern such as 0.*. If --tag is"
            " repeated, a run must have all of these tags.",
        ),
        click.Option(
            ["--name", "names"],
            metavar="PATTERN",
            multiple=True,
            help="List only runs whose name matches a shell pattern such as 'lr-*'. --name may be"
            " repeated.",
        ),
        click.Option(
            ["--since"],
            metavar="TIME",
            help="List only runs that began within this time, such as 2d, or since a date such as"
            " 2026-01-31.",
        ),
        click.Option(
            ["--limit"],
            metavar="N",
            type=click.IntRange(1),
            help=f"List at most the newest N runs. By default, a terminal shows {_TERMINAL_RUNS}"
            " runs, and a file or pipe gets all runs.",
        ),
        FORMAT,
        click.Option(
            ["--remove-older"],
            metavar="TIME",
            help="Ask, and remove the runs that ended more than this time ago, such as 30d.",
        ),
        click.Option(["--yes"], is_flag=True, help="Remove runs without asking, for scripts."),
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run ``poprun-py runs`` with the arguments ``words`` and return the exit code.

    Raises:
        UsageError: An argument is not accepted, the folder cannot be read, or the removal can
            neither ask nor was confirmed with --yes.
    """
    values = parse_words(RUNS, words)
    if values is None:
        return 0
    now = time.time()
    wanted = _filter(values, now)
    age = _checked_age(values)
    parent = runs_folder(values["parent"])
    # The folder of the option output_dir does not exist before the first run.
    is_new = values["parent"] is None and not parent.exists()
    runs = [] if is_new else wanted.select(read_summaries(parent))
    unreadable = unreadable_folders(parent)
    if unreadable:
        print_warning(_unreadable_text(unreadable, parent))
    if age is not None:
        return _remove(parent, runs, now - age, wanted, values)
    _list(parent, runs, now, wanted, values)
    return 0


def _filter(values: dict[str, Any], now: float) -> RunFilter:
    since = values["since"]
    return RunFilter(
        states=frozenset(map(RunState, values["states"])),
        names=values["names"],
        tags=values["tags"],
        since=None if since is None else parse_since(since, now),
    )


def _checked_age(values: dict[str, Any]) -> float | None:
    """Return the age of runs to remove, in seconds; None to list runs."""
    if values["remove_older"] is None:
        if values["yes"]:
            raise UsageError(
                "--yes can only be used with --remove-older; add --remove-older AGE, or omit --yes"
            )
        return None
    for name in ("limit", "form"):
        if values[name] not in (None, "text"):
            option = "--format" if name == "form" else f"--{name}"
            raise UsageError(
                f"--remove-older and {option} cannot be used together; omit one of the two options"
            )
    return parse_age("--remove-older", values["remove_older"])


def runs_folder(given: str | None) -> Path:
    """Return the folder that contains the folders of the runs.

    Without ``given``, this is the folder of the option output_dir, as a launch would use it. If
    this option is not set either, the current folder is used, or its folder ``runs`` if only this
    one has runs.

    Raises:
        UsageError: ``given`` is the folder of one run, or an option is not accepted.
    """
    if given is not None:
        if (Path(given) / "report.json").is_file():
            raise UsageError(
                f"{given} is the folder of a single run; give the folder that contains the runs, "
                f"or show this run with {command_name()} report {given}"
            )
        return Path(given)
    output_dir, _ = output_dir_option()
    if output_dir is not None:
        return Path(output_dir)
    usual = Path(DEFAULT_PARENT)
    return usual if usual.is_dir() and not read_summaries(Path()) else Path()


# --- the list of runs ---------------------------------------------------------------------------


def _list(
    parent: Path, runs: Sequence[RunSummary], now: float, wanted: RunFilter, values: dict[str, Any]
) -> None:
    limit = values["limit"]
    if values["form"] == "json":
        shown = [run.to_json(now) for run in runs[:limit]]
        document = {"version": _JSON_VERSION, "folder": str(parent.absolute()), "runs": shown}
        print_out(json.dumps(document, indent=2))
        return
    if not runs:
        if wanted.accepts_all and unreadable_folders(parent):
            print_error(f"{command_name()}: there are no readable runs in {_place(parent)}")
        else:
            print_error(f"{command_name()}: {_none_text(parent, wanted)}")
        return
    if limit is None and sys.stdout.isatty():
        limit = _TERMINAL_RUNS
    _print_table(parent, runs[:limit], now)
    if limit is not None and len(runs) > limit:
        flush_stdout()
        more = counted(len(runs) - limit, "older run")
        print_error(
            f"{command_name()}: {more} {are(len(runs) - limit)} not listed; --limit {len(runs)} "
            "lists all runs"
        )


def _unreadable_text(number: int, parent: Path) -> str:
    folders = counted(number, "folder")
    return (
        f"{folders} in {_place(parent)} cannot be read (Permission denied), so the list of runs "
        "is not complete"
    )


def _none_text(parent: Path, wanted: RunFilter) -> str:
    if wanted.accepts_all:
        return (
            f"there are no runs in {_place(parent)}; {command_name()} --output-dir {parent} "
            "PROGRAM starts a job and records its run in this folder"
        )
    return f"no run in {_place(parent)} matches the given filters"


def _place(parent: Path) -> Path:
    """Return the folder as the user gave it; for the current folder, its absolute path."""
    return parent.absolute() if parent == Path() else parent


def _print_table(parent: Path, runs: Sequence[RunSummary], now: float) -> None:
    from poprun_py.past_runs.listing.run_table import run_lines

    # If stdout is a pipe, tables may be wider than a terminal.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    text = "\n".join(run_lines(runs, parent, now, width=width, colour=wants_colour()))
    print_out(text if can_print(text) else text.replace("─", "-"))


# --- the removal of runs ------------------------------------------------------------------------


def _remove(
    parent: Path,
    runs: Sequence[RunSummary],
    before: float,
    wanted: RunFilter,
    values: dict[str, Any],
) -> int:
    """List old runs, ask, and remove them; return the exit code."""
    from poprun_py.past_runs.listing.run_removal import disk_bytes, old_runs, remove_runs

    old = old_runs(runs, before=before, states=wanted.states)
    if not old:
        conditions = "" if wanted.accepts_all else " and matches the given filters"
        print_error(
            f"{command_name()}: nothing was removed, because no run in {_place(parent)} ended more "
            f"than {values['remove_older']} ago{conditions}"
        )
        return 0
    _print_table(parent, old, time.time())
    flush_stdout()
    size = bytes_text(sum(disk_bytes(run.folder) for run in old))
    if not values["yes"] and not _is_confirmed(
        f"remove the folders of {counted(len(old), 'run')} ({size})?"
    ):
        print_error(f"{command_name()}: no run was removed")
        return 1
    result = remove_runs(parent, old)
    for trouble in result.troubles:
        print_warning(trouble)
    print_error(f"{command_name()}: removed {counted(len(result.removed), 'run')}")
    return 1 if result.troubles else 0


def _is_confirmed(question: str) -> bool:
    """Ask the user a question in the terminal, and return whether the answer is yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "--remove-older asks for confirmation, but standard input or standard error is not a "
            "terminal; no run was removed; add --yes to remove runs without confirmation"
        )
    with usage_errors():
        return click.confirm(f"{command_name()}: {question}", err=True)
