"""``poprun-py compare RUN RUN ...``: runs of --output-dir side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from poprun_py.command.words import (
    HELP,
    OUTPUT_DIR,
    check_page_name,
    page_width,
    print_json,
    read_words,
    save_page,
)
from poprun_py.console import command_name
from poprun_py.errors import UsageError
from poprun_py.past_runs.comparison import Comparison, compare
from poprun_py.past_runs.fairness import remarks_on, who_was_slow
from poprun_py.past_runs.measurement import measure
from poprun_py.past_runs.recorded_run import NOT_A_RUN, RecordedRun, read_run
from poprun_py.past_runs.run_files import find_run
from poprun_py.past_runs.targets import Target, parse_target
from poprun_py.terminal import can_print, print_error, print_out, wants_colour

_HELP: Final = """Compare runs that --output-dir kept: samples per second, times of a step,
seconds, loss, and speedup and scaling efficiency against the first one.

RUN is the folder of a run, or its name in --output-dir; latest is the newest one. What makes the
comparison unfair, such as another program, version or host, is said below the table.

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
            help="Compare the seconds until a value that popdist_py.Metrics logged, or the loss,"
            " was at least NUMBER; at most, where the name holds loss, error or perplexity, or with"
            " 'NAME<=NUMBER'.",
        ),
        click.Option(
            ["--group"],
            is_flag=True,
            help="Take runs of the same program, arguments, counts and hosts as repetitions of one:"
            " the median and the range are shown.",
        ),
        click.Option(
            ["--format", "form"],
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="How it is printed.",
        ),
        click.Option(
            ["--output"], metavar="FILE.html", help="Draw it as a page for a browser, too."
        ),
        OUTPUT_DIR,
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Compare runs and return the exit code.

    Raises:
        UsageError: a word is not accepted, or there is no such run.
    """
    values = read_words(COMPARE, words)
    if values is None:
        return 0
    target = parse_target(values["target"]) if values["target"] is not None else None
    check_page_name(values["output"])
    runs = _read(values["runs"], values["parent"])
    try:
        _show(_compare(runs, target, values), runs, values)
    except NOT_A_RUN as error:
        names = ", ".join(values["runs"])
        raise UsageError(
            f"the reports of {names} cannot be compared ({error!r:.200}): was one edited?"
        ) from None
    return 0


def _show(comparison: Comparison, runs: Sequence[RecordedRun], values: dict[str, Any]) -> None:
    """Print a comparison, and write its page if one is wanted."""
    if values["form"] == "json":
        print_json(comparison.to_json())
    else:
        from poprun_py.past_runs.comparison_table import comparison_lines

        lines = comparison_lines(
            comparison, width=page_width(), colour=wants_colour(), blocks=can_print("█▏")
        )
        print_out("\n".join(lines))
    if values["output"] is not None:
        from poprun_py.past_runs.pages.comparison_page import comparison_page

        save_page(Path(values["output"]), comparison_page(comparison, runs))
        print_error(f"{command_name()}: the page is {values['output']}")


def _read(names: Sequence[str], parent: str) -> list[RecordedRun]:
    """Return the runs that a user names.

    Raises:
        UsageError: they are too few, one is not there, or one is given twice.
    """
    if len(names) < 2:
        given = f"only {names[0]!r} is given" if names else "none is given"
        raise UsageError(
            f"compare needs at least two runs, {given}: expected folders of --output-dir, or names "
            f"in {parent}"
        )
    found: dict[Path, str] = {}
    runs = []
    for name in names:
        files = find_run(name, parent)
        if files.folder in found:
            raise UsageError(f"{found[files.folder]} and {name} are the same run: give it once")
        found[files.folder] = name
        runs.append(read_run(files))
    return _told_apart(runs, names)


def _told_apart(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[RecordedRun]:
    """Return the runs, those of the same name, such as a copied folder, as the user calls them."""
    many = {name for name, times in Counter(run.run_id for run in runs).items() if times > 1}
    return [
        replace(run, report={**run.report, "run_id": name}) if run.run_id in many else run
        for run, name in zip(runs, names, strict=True)
    ]


def _compare(
    runs: Sequence[RecordedRun], target: Target | None, values: dict[str, Any]
) -> Comparison:
    measured = [measure(run, target) for run in runs]
    troubles = [f"{run.run_id}: {trouble}" for run in runs for trouble in run.troubles]
    return compare(
        measured,
        target=target,
        grouped=values["group"],
        remarks=(*who_was_slow(measured), *remarks_on(measured), *troubles),
    )
