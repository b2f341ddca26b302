"""The subcommand ``poprun-py compare``, which compares runs in the folder ``--output-dir``.

The subcommand ``scale`` uses functions of this module to print and save its comparison.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from popdist_py.atomic_file import write_whole
from poprun_py.command.click_commands import FORMAT, HELP, parse_words
from poprun_py.command.named_runs import OUTPUT_DIR, run_named
from poprun_py.errors import UsageError
from poprun_py.options.written_files import PAGE_BEGINNINGS, require_same_kind
from poprun_py.past_runs.comparison import Comparison, compare, remarks_on, slow_instances
from poprun_py.past_runs.measured_run import Target, measure, parse_target
from poprun_py.past_runs.recorded_run import DAMAGE_ERRORS, RecordedRun, read_run
from poprun_py.terminal import can_print, command_name, print_error, print_out, wants_colour

_PIPE_WIDTH = 200
_HELP: Final = """Compare samples per second, step times, duration and loss of recorded runs, and
their speedup and scaling efficiency against the first run.

RUN is the folder of a run, or the name of a run in --output-dir. The name latest means the newest
run. Notes below the table mention differences that make the comparison unfair, such as another
program, version or host. A figure with * cannot be trusted. For each such figure, a line below the
table gives the reason, such as the load of other programs.

\b
Examples:
  poprun-py compare runs/20260131-120000-1a2b3c latest
  poprun-py compare --target accuracy=0.9 one-instance two-instances
  poprun-py compare --group --output runs.html runs/lr-*
"""
COMPARE: Final = click.Command(
    "compare",
    help=_HELP,
    add_help_option=False,
    params=[
        click.Argument(["runs"], nargs=-1, metavar="RUN RUN..."),
        click.Option(
            ["--target"],
            metavar="NAME=NUMBER",
            help="Compare the seconds until the loss, or a value NAME logged with"
            " popdist_py.Metrics, has reached the target NUMBER. The target is reached if the value"
            " is at least NUMBER. If NAME contains loss, error or perplexity, or for"
            " 'NAME<=NUMBER', the value must be at most NUMBER.",
        ),
        click.Option(
            ["--group"],
            is_flag=True,
            help="Treat runs with the same program, arguments, hosts, number of instances and"
            " number of replicas as repetitions, and show their median and range.",
        ),
        FORMAT,
        click.Option(
            ["--output"],
            metavar="FILE.html",
            help="Also write the comparison as an HTML page to this file.",
        ),
        OUTPUT_DIR,
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run ``poprun-py compare`` with the arguments ``words`` and return the exit code.

    Raises:
        UsageError: An argument is not accepted, or a run does not exist.
    """
    values = parse_words(COMPARE, words)
    if values is None:
        return 0
    target = parse_target(values["target"]) if values["target"] is not None else None
    check_page_name(values["output"])
    runs = _read(values["runs"], values["parent"])
    try:
        _show(_compare(runs, target, values), runs, values)
    except DAMAGE_ERRORS as error:
        names = ", ".join(values["runs"])
        raise UsageError(
            f"the runs {names} cannot be compared, because a report.json of these runs is damaged "
            f"({error!r:.200}); restore the report.json, or omit its run"
        ) from None
    return 0


def _show(comparison: Comparison, runs: Sequence[RecordedRun], values: dict[str, Any]) -> None:
    from poprun_py.past_runs.comparison_tables import comparison_lines

    print_comparison(comparison, values["form"], comparison_lines)
    if values["output"] is not None:
        from poprun_py.past_runs.pages.comparison_page import comparison_page

        save_page(Path(values["output"]), comparison_page(comparison, runs))


def _read(names: Sequence[str], parent: str | None) -> list[RecordedRun]:
    """Read the records of the runs with the given names."""
    if len(names) < 2:
        given = f"only the run {names[0]!r} was given" if names else "no run was given"
        raise UsageError(
            f"compare needs at least two runs, but {given}; give each run as its folder, or as its "
            f"name in {parent or 'the folder of runs'} (--output-dir)"
        )
    found: dict[Path, str] = {}
    runs = []
    for name in names:
        files = run_named(name, parent)
        if files.folder in found:
            raise UsageError(
                f"{found[files.folder]} and {name} are the same run; give each run once"
            )
        found[files.folder] = name
        runs.append(read_run(files))
    return _with_unique_names(runs, names)


def _with_unique_names(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[RecordedRun]:
    """Return the runs, renamed so that their names are unique.

    If runs have the same name, such as copied folders, the runs get the names that the user typed.
    """
    many = {name for name, times in Counter(run.run_id for run in runs).items() if times > 1}
    return [
        replace(run, report={**run.report, "run_id": name}) if run.run_id in many else run
        for run, name in zip(runs, names, strict=True)
    ]


def _compare(
    runs: Sequence[RecordedRun], target: Target | None, values: dict[str, Any]
) -> Comparison:
    measured = [measure(run, target) for run in runs]
    problems = [f"{run.run_id}: {problem}" for run in runs for problem in run.problems]
    return compare(
        measured,
        target=target,
        grouped=values["group"],
        remarks=(*slow_instances(measured), *remarks_on(measured), *problems),
    )


# --- printing and saving a comparison -----------------------------------------------------------


def print_comparison(
    comparison: Comparison, form: str, text_lines: Callable[..., list[str]]
) -> None:
    """Print a comparison as JSON, or as the lines that ``text_lines`` returns."""
    if form == "json":
        print_out(json.dumps(comparison.to_json(), indent=2))
        return
    # If stdout is a pipe, tables may be wider than a terminal.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    lines = text_lines(comparison, width=width, colour=wants_colour(), blocks=can_print("█▏"))
    print_out("\n".join(lines))


def check_page_name(path: str | None, option: str = "--output") -> None:
    """Check the path that the user gave for an HTML page; None is accepted.

    Raises:
        UsageError: The path does not end in .html, its folder does not exist, or the file exists
            and is not a page.
    """
    if path is None:
        return
    if not path.endswith(".html"):
        raise UsageError(
            f"{option} {path}: expected a file name that ends in .html, because the page is "
            "written as HTML"
        )
    if not Path(path).parent.is_dir():
        raise UsageError(
            f"{option} {path}: the folder {Path(path).parent} does not exist; give a path in an "
            "existing folder"
        )
    require_same_kind(Path(path), option, "page", PAGE_BEGINNINGS)


def save_page(path: Path, text: str, option: str = "--output") -> None:
    """Write an HTML page atomically, over any existing file, and print the page's path.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(
            f"{option} {path}: the page cannot be written ({error.strerror}); give the path of a "
            "file that can be written"
        ) from None
    print_error(f"{command_name()}: the page of the comparison is {path}")
