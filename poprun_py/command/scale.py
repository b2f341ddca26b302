"""``poprun-py scale PROGRAM --instances 1,2,4``: how speed grows with the number of instances.

Each run is launched in this process, as ``poprun-py`` would launch it: what was planned and checked
before the first run is what runs, signals are the supervisor's matter, values of --env stand on no
command line, and a launcher that is killed leaves nothing behind. The instances write to their
files in the run's folder, and read nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from popdist_py.environment import RUN_ID
from popdist_py.errors import are, counted
from poprun_py.command.measured_runs import MeasuredRuns
from poprun_py.command.words import (
    HELP,
    check_page_name,
    page_width,
    print_json,
    read_words,
    save_page,
)
from poprun_py.console import command_name
from poprun_py.errors import UsageError
from poprun_py.launching.run_record import new_run_id
from poprun_py.options.command_line import parse
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import AUTO, option_name
from poprun_py.past_runs.comparison import Comparison, compare
from poprun_py.past_runs.fairness import who_was_slow
from poprun_py.past_runs.run_files import DEFAULT_PARENT
from poprun_py.past_runs.scaling import interleaved, parse_counts
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.terminal import (
    can_print,
    flush_stdout,
    print_error,
    print_out,
    print_warning,
    wants_colour,
)

_HELP: Final = """Run PROGRAM with several numbers of instances, and show how its speed grows.

Each count is run several times, in turns (1, 2, 4, 1, 2, 4, ...), and the median counts. Every
option of poprun-py may stand before PROGRAM; those below may also stand after it, and what follows
-- is always the program's. With --num-replicas N each run has the same N replicas (strong scaling),
else as many as instances (weak scaling); --timeout limits each run. Every run is kept in
--output-dir (runs), for poprun-py compare.

\b
Examples:
  poprun-py scale train.py --instances 1,2,4
  poprun-py scale --instances 1-4 --num-replicas 12 train.py --epochs 1
  poprun-py scale --host node[0-3] --instances 4,8,16 --timeout 5m -m package.train
  poprun-py scale train.py --instances 1,2 -- --output model.pt
"""
_MOST_REPEATS: Final = 100
SCALE: Final = click.Command(
    "scale",
    help=_HELP,
    add_help_option=False,
    options_metavar="[OPTIONS] PROGRAM [ARGUMENTS]",
    params=[
        click.Option(
            ["--instances"],
            metavar="COUNTS",
            help="Numbers of instances, such as 1,2,4 or 1-4; the first is what the others are"
            " compared with.",
        ),
        click.Option(
            ["--repeats"],
            metavar="N",
            type=click.IntRange(1, _MOST_REPEATS),
            default=3,
            show_default=True,
            help="Runs of each count.",
        ),
        click.Option(
            ["--format", "form"],
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="How the result is printed.",
        ),
        click.Option(
            ["--output"],
            metavar="FILE.html",
            help="Where it is drawn as a page for a browser. Unset: scale-ID.html beside the runs.",
        ),
        HELP,
    ],
)
_OWN: Final = ("--instances", "--repeats", "--format", "--output")
# Options of a launch that have no place in a series of them.
_ONE_RUN_ONLY: Final = (
    *("num_instances", "nproc_per_node", "check", "live", "stdin_instance"),
    *(field for field, opt in OPTIONS.items() if opt.group == "Inspection"),
    *("export_config", "overwrite_config", "version", "version_format"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What is asked for; ``values`` are those of the launch's options, with the program."""

    counts: tuple[int, ...]
    repeats: int
    form: str
    output: str | None
    values: dict[str, Any]


def main(words: Sequence[str]) -> int:
    """Run a program with several numbers of instances and return the exit code.

    Raises:
        UsageError: a word is not accepted, or a count does not fit the machines; nothing was
            started.
        StartError: a launch could not start.
    """
    asked = _read(words)
    if asked is None:
        return 0
    plans = _plans(asked)
    prefix = f"scale-{new_run_id({})}"
    config = plans[asked.counts[0]].config
    folder = Path(config.output_dir or DEFAULT_PARENT)
    todo = interleaved(prefix, asked.counts, asked.repeats)
    program = " ".join(asked.values["program"])
    count = counted(len(todo), "run")
    print_error(f"{command_name()}: {count} of {program} in {folder}/{prefix}-*")
    _leave_the_keyboard()
    gc.enable()
    runs = MeasuredRuns(folder, is_verbose=config.verbosity >= 1)
    try:
        for number, each in enumerate(todo, 1):
            plan = plans[each.instances]
            planned = replace(plan, environ={**plan.environ, RUN_ID: each.name})
            if not runs.make(planned, f"[{number}/{len(todo)}]"):
                break
    except KeyboardInterrupt:
        runs.exit_code = 130
    finally:
        if runs.measured:
            _show(runs, asked, folder / f"{prefix}.html", len(todo))
    return runs.exit_code


def _leave_the_keyboard() -> None:
    """Give the instances nothing to read: a job has one reader, and these are many jobs."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)


# --- words --------------------------------------------------------------------------------------


def _read(words: Sequence[str]) -> _Asked | None:
    """Return what the words ask for; None if it was help, which is printed.

    Raises:
        UsageError: a word is not accepted.
    """
    ends = list(words).index("--") if "--" in words else len(words)
    own, others = _own_words(words[:ends])
    values = parse(others)
    if "help" in values:
        read_words(SCALE, ["--help"])
        return None
    given = read_words(SCALE, own)
    assert given is not None
    for field in _ONE_RUN_ONLY:
        if values.get(field) not in (None, False):
            name = option_name(field)
            hint = ": --instances names the counts" if field == "num_instances" else ""
            raise UsageError(f"{name} is no option of scale, which launches several jobs{hint}")
    if values.get("timeline") not in (None, AUTO):
        raise UsageError("--timeline FILE would be of the last run only: give --timeline alone")
    values["program"] += tuple(words[ends + 1 :])
    if not values["program"]:
        raise UsageError("scale needs a PROGRAM, such as scale train.py --instances 1,2,4")
    if given["instances"] is None:
        raise UsageError("scale needs --instances COUNTS: expected counts such as 1,2,4 or 1-4")
    check_page_name(given["output"])
    return _Asked(
        counts=parse_counts(given["instances"]),
        repeats=given["repeats"],
        form=given["form"],
        output=given["output"],
        values=values,
    )


def _own_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of scale with their values, wherever they stand, and all other words."""
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in _OWN:
            others.append(word)
        else:
            own += [word] if equals else [word, *([value] if (value := next(rest, "")) else [])]
    return own, others


# --- plans --------------------------------------------------------------------------------------


def _plans(asked: _Asked) -> dict[int, LaunchPlan]:
    """Return the plan of each count; all are checked before anything starts.

    Raises:
        UsageError: a count does not fit the machines.
        StartError: the program, an MPI or a host is missing.
    """
    from poprun_py.launching import launch_planning
    from poprun_py.options.gathered_options import gather_options
    from poprun_py.planning.user_program import require_program

    plans: dict[int, LaunchPlan] = {}
    for count in asked.counts:
        try:
            gathered = gather_options({**asked.values, "num_instances": count}, os.environ)
            planned = launch_planning.plan(_kept(gathered.config), contact_hosts=True)
            planned.require_fit()
        except UsageError as error:
            raise UsageError(f"--instances {count}: {error}; nothing was started") from None
        if not plans:
            require_program(planned.config.program, planned.environ)
            for warning in gathered.warnings:
                print_warning(warning)
        plans[count] = planned
    return plans


def _kept(config: LaunchConfig) -> LaunchConfig:
    """Return a configuration whose run is kept: without a folder there is nothing to measure."""
    return config if config.output_dir else replace(config, output_dir=DEFAULT_PARENT)


# --- the result ---------------------------------------------------------------------------------


def _show(runs: MeasuredRuns, asked: _Asked, usual_page: Path, wanted: int) -> None:
    """Print what the runs tell together, and draw it."""
    comparison = _comparison(runs, wanted)
    if asked.form == "json":
        print_json(comparison.to_json())
    else:
        from poprun_py.past_runs.scaling_table import scaling_lines

        lines = scaling_lines(
            comparison, width=page_width(), colour=wants_colour(), blocks=can_print("█▏")
        )
        print_out("\n".join(lines))
    flush_stdout()
    from poprun_py.past_runs.pages.comparison_page import scaling_page

    path = Path(asked.output) if asked.output is not None else usual_page
    save_page(path, scaling_page(comparison, asked.counts))
    print_error(f"{command_name()}: the page is {path}")


def _comparison(runs: MeasuredRuns, wanted: int) -> Comparison:
    remarks = [*who_was_slow(runs.measured), *runs.remarks]
    if len(runs.measured) < wanted:
        remarks.append(f"{len(runs.measured)} of {wanted} runs {are(len(runs.measured))} measured")
    return compare(runs.measured, grouped=True, remarks=remarks)
