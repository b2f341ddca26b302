"""The subcommand ``poprun-py scale``, which measures a program with several numbers of instances.

All runs are planned and checked before the first run starts. The process of ``scale`` itself
launches the runs. The standard input of the instances is empty, and their output is only written to
the files of the run.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from popdist_py.environment import RUN_ID
from popdist_py.errors import are, counted
from poprun_py.command.click_commands import FORMAT, HELP, parse_words
from poprun_py.command.compare import check_page_name, print_comparison, save_page
from poprun_py.display.formatting import milliseconds_text, number_text
from poprun_py.errors import UsageError
from poprun_py.launching.run_names import new_run_id
from poprun_py.options.command_line import parse
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_types import AUTO, CSV, JSONL, option_name, read_destinations
from poprun_py.past_runs.comparison import compare, slow_instances
from poprun_py.past_runs.measured_run import Measured, measure
from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import DEFAULT_PARENT, RunFiles
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.running.supervise.launch_result import Cause, LaunchResult
from poprun_py.terminal import (
    Console,
    can_rewrite_lines,
    command_name,
    flush_stdout,
    print_error,
    print_warning,
    rewrite_line,
)

_HELP: Final = """Run PROGRAM with several numbers of instances, and show how its speed grows.

PROGRAM is run several times with each number of instances, in the order 1, 2, 4, 1, 2, 4, ..., and
the median is shown. All options of poprun-py are accepted before PROGRAM. The options of
poprun-py scale are also accepted after PROGRAM. All words after -- are arguments of PROGRAM. With
--num-replicas N, every run has N replicas (strong scaling). Without --num-replicas, a run has as
many replicas as instances (weak scaling). --timeout limits the time of each run. The folder of
--output-dir (by default runs) keeps the runs, so that poprun-py compare can read them. A figure
with * cannot be trusted. For each such figure, a line below the table gives the reason, such as
other load or another number of threads.

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
            help="Numbers of instances, such as 1,2,4 or 1-4. The speed with the first number is"
            " the base of the comparison.",
        ),
        click.Option(
            ["--repeats"],
            metavar="N",
            type=click.IntRange(1, _MOST_REPEATS),
            default=3,
            show_default=True,
            help="Number of runs for each number of instances.",
        ),
        FORMAT,
        click.Option(
            ["--output"],
            metavar="FILE.html",
            help="Write the result as an HTML page to this file. By default, the page is"
            " scale-ID.html beside the runs.",
        ),
        HELP,
    ],
)
_OWN_OPTIONS: Final = {name for param in SCALE.params if param is not HELP for name in param.opts}
# Options of poprun-py that the subcommand scale does not accept.
_ONE_RUN_ONLY: Final = (
    *("num_instances", "nproc_per_node", "check", "live", "stdin_instance", "run_name"),
    *(field for field, opt in OPTIONS.items() if opt.group == "Inspection"),
    *("export_config", "overwrite_config", "version", "version_format", "names_change"),
)
_RANGE: Final = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)
_MOST_COUNTS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arguments:
    """The parsed command line of ``scale``; ``values`` holds the launch options and the program."""

    counts: tuple[int, ...]
    repeats: int
    form: str
    output: str | None
    values: dict[str, Any]


def main(words: Sequence[str]) -> int:
    """Run a program with several numbers of instances and return the exit code.

    Raises:
        UsageError: An argument is not accepted, or a number of instances does not fit the machines.
            No run was started.
        StartError: A run could not start.
    """
    arguments = _parse(words)
    if arguments is None:
        return 0
    plans = _plans(arguments)
    prefix = f"scale-{new_run_id({})}"
    config = plans[arguments.counts[0]].config
    folder = Path(config.output_dir or DEFAULT_PARENT)
    wanted = scaling_runs(prefix, arguments.counts, arguments.repeats)
    program = " ".join(arguments.values["program"])
    runs_text = counted(len(wanted), "run")
    print_error(
        f"{command_name()}: starting {runs_text} of {program}; the folders of the runs are "
        f"{folder}/{prefix}-*"
    )
    _close_input()
    gc.enable()
    runs = _MeasuredRuns(folder, is_verbose=config.verbosity >= 1)
    try:
        for number, (name, count) in enumerate(wanted, 1):
            plan = plans[count]
            planned = replace(plan, environ={**plan.environ, RUN_ID: name})
            if not runs.make(planned, f"[{number}/{len(wanted)}]"):
                break
    except KeyboardInterrupt:
        runs.exit_code = 130
    finally:
        if runs.measured:
            _show(runs, arguments, folder / f"{prefix}.html", len(wanted))
    return runs.exit_code


def _close_input() -> None:
    """Replace standard input by /dev/null, because the first run would read all of the input."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


# --- parsing the command line of scale ----------------------------------------------------------


def _parse(words: Sequence[str]) -> _Arguments | None:
    """Return the parsed command line; if ``words`` contain --help, print the help, return None."""
    ends = list(words).index("--") if "--" in words else len(words)
    own, others = _split_words(words[:ends])
    values = parse(others)
    if "help" in values:
        parse_words(SCALE, ["--help"])
        return None
    given = parse_words(SCALE, own)
    assert given is not None
    for field in _ONE_RUN_ONLY:
        if values.get(field) not in (None, False):
            name = values[field] if field == "names_change" else option_name(field)
            hint = (
                "; give the numbers of instances with --instances"
                if field == "num_instances"
                else ""
            )
            raise UsageError(
                f"{name} cannot be used with scale, because scale launches several jobs{hint}"
            )
    if values.get("timeline") not in (None, AUTO):
        raise UsageError(
            "--timeline FILE cannot be used with scale, because each run would overwrite FILE; "
            "give --timeline without FILE"
        )
    for each in read_destinations(values.get("metrics_to", ())):
        if each.tool in (CSV, JSONL) and each.where:
            raise UsageError(
                f"--metrics-to {each} cannot be used with scale, because each run needs a file of "
                f"its own; give --metrics-to {each.tool}, which writes a file into the folder of "
                "each run"
            )
    for name in options_after_program(values["program"]):
        program = short_name(values["program"])
        print_warning(
            f"{name} after {program} is passed to {program}, not to {command_name()}; to pass "
            f"{name} to {command_name()}, write it before {program}; to pass {name} to {program} "
            "without this warning, write it after --"
        )
    values["program"] += tuple(words[ends + 1 :])
    if not values["program"]:
        raise UsageError(
            f"scale needs a PROGRAM, such as train.py in {command_name()} scale train.py "
            "--instances 1,2,4"
        )
    if given["instances"] is None:
        raise UsageError(
            "scale needs --instances with numbers of instances, such as --instances 1,2,4 or "
            "--instances 1-4"
        )
    check_page_name(given["output"])
    return _Arguments(
        counts=parse_counts(given["instances"]),
        repeats=given["repeats"],
        form=given["form"],
        output=given["output"],
        values=values,
    )


def options_after_program(program: Sequence[str]) -> list[str]:
    """Return the words of a program's command that ``scale`` accepts as options before the program.

    Options of ``scale`` itself may stand after the program, so users may expect the same of others.
    """
    names = {option_name(field) for field in OPTIONS if field not in _ONE_RUN_ONLY}
    given = (word.partition("=")[0] for word in program)
    return [name for name in dict.fromkeys(given) if name in names]


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the options of ``scale`` with their values, and all other words."""
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in _OWN_OPTIONS:
            others.append(word)
            continue
        own.append(word)
        if not equals and (value := next(rest, "")):
            own.append(value)
    return own, others


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of instances, such as ``1,2,4`` or ``1-4``.

    Raises:
        UsageError: The text does not list numbers, or contains a number twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else 0
        if not 1 <= low <= high or high - low >= _MOST_COUNTS:
            raise UsageError(
                f"--instances {text!r}: expected at most {_MOST_COUNTS} numbers of instances, such "
                "as 1,2,4 or 1-4"
            )
        found += range(low, high + 1)
    if len(set(found)) < len(found):
        twice = next(count for count in found if found.count(count) > 1)
        raise UsageError(
            f"--instances {text!r}: the number {twice} is given twice; give each number once"
        )
    if len(found) > _MOST_COUNTS:
        raise UsageError(
            f"--instances {text!r}: expected at most {_MOST_COUNTS} numbers of instances"
        )
    return tuple(found)


def scaling_runs(prefix: str, counts: Sequence[int], repeats: int) -> list[tuple[str, int]]:
    """Return the name and the number of instances of each run, in the order 1, 2, 4, 1, 2, 4.

    The order alternates, so that a slow phase of the machine affects all numbers of instances, not
    only one number.
    """
    repetitions = range(1, repeats + 1)
    return [(f"{prefix}-n{count}-{repeat}", count) for repeat in repetitions for count in counts]


# --- plans for the numbers of instances ---------------------------------------------------------


def _plans(arguments: _Arguments) -> dict[int, LaunchPlan]:
    """Return a checked plan for each number of instances."""
    from poprun_py.launching import launch_planning
    from poprun_py.options.gathered_options import gather_options
    from poprun_py.planning.user_program import require_program

    plans: dict[int, LaunchPlan] = {}
    for count in arguments.counts:
        try:
            gathered = gather_options({**arguments.values, "num_instances": count}, os.environ)
            planned = launch_planning.plan(_with_folder(gathered.config), contact_hosts=True)
            planned.require_fit()
        except UsageError as error:
            raise UsageError(f"--instances {count}: {error}; no run was started") from None
        if not plans:
            require_program(planned.config.program, planned.environ)
            for warning in gathered.warnings:
                print_warning(warning)
        plans[count] = planned
    return plans


def _with_folder(config: LaunchConfig) -> LaunchConfig:
    """Return the configuration with an output folder, and without a name for a single run.

    The runs are measured from files in the output folder.
    """
    return replace(
        config,
        output_dir=config.output_dir or DEFAULT_PARENT,
        run_name=None,
        origins={name: each for name, each in config.origins.items() if name != "run_name"},
    )


# --- launching and measuring the runs -----------------------------------------------------------


class _OncePerWarning(Console):
    """A console for several launches, which prints each warning once and logs other messages."""

    def __init__(self, *, is_verbose: bool) -> None:
        super().__init__(is_verbose=is_verbose, prints_bindings=False)
        self._warned: set[str] = set()

    def warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            super().warn(sentence)

    def tell(self, sentence: str) -> None:
        self.log(sentence)

    def _clear_row(self) -> None:
        # The row shows which run is running.
        if can_rewrite_lines():
            rewrite_line("")


class _MeasuredRuns:
    """Launches runs one after another, and keeps their measurements."""

    def __init__(self, folder: Path, *, is_verbose: bool) -> None:
        self.measured: list[Measured] = []
        self.are_limited = False
        self.exit_code = 0
        self._folder = folder
        self._can_erase = can_rewrite_lines()
        self._console = _OncePerWarning(is_verbose=is_verbose)

    def make(self, planned: LaunchPlan, place: str) -> bool:
        """Launch and measure a run; return whether the next run may start.

        The environment of the plan contains the run's name. Progress messages begin with ``place``,
        such as ``[2/6]``.
        """
        title = f"{place} {counted(planned.topology.num_instances, 'instance')}"
        if self._can_erase:
            rewrite_line(f"{title} ...")
        try:
            result = self._launch(planned)
        except BaseException:
            if self._can_erase:
                rewrite_line("")
            raise
        measured = measure(read_run(RunFiles(self._folder / result.run_id)))
        is_limited = result.timed_out and measured.step_seconds is not None
        if result.exit_code and not is_limited:
            self._tell_end(planned, result, title)
            return False
        self.are_limited |= is_limited
        self.measured.append(measured)
        self._end_progress(f"{title}: {_speed_text(measured)}")
        if result.was_interrupted:
            self.exit_code = 130
        return not result.was_interrupted

    def _launch(self, planned: LaunchPlan) -> LaunchResult:
        """Launch a plan. The instances' output is written only to the folder of the run."""
        from poprun_py.launching.launch import Request, launch

        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return launch(Request(planned, descriptors=(nowhere, nowhere)), self._console)
        finally:
            os.close(nowhere)

    def _tell_end(self, planned: LaunchPlan, result: LaunchResult, title: str) -> None:
        """Print the reason why a run failed or was stopped, and keep its exit code."""
        from poprun_py.launching.failure_report import report_text

        self.exit_code = result.exit_code
        if result.cause is Cause.SIGNAL:
            self._end_progress(f"{title}: the run was stopped")
            return
        self._end_progress(
            f"{title}: the run failed; its output is in the folder {self._folder / result.run_id}"
        )
        # The run's output was not shown, so the report must contain the end of stderr.
        if report := report_text(result, planned.instance_label, repeats_stderr=True):
            print_error(report.removesuffix("\n"))

    def _end_progress(self, line: str) -> None:
        if self._can_erase:
            rewrite_line("")
        print_error(line)


def _speed_text(measured: Measured) -> str:
    parts = []
    if measured.samples_per_second is not None:
        parts.append(f"{number_text(measured.samples_per_second)} samples/s")
    if measured.step_seconds is not None:
        parts.append(f"{milliseconds_text(measured.step_seconds)} per step")
    if measured.seconds is not None:
        parts.append(f"{number_text(measured.seconds)} s in total")
    return ", ".join(parts)


# --- printing the result ------------------------------------------------------------------------


def _show(runs: _MeasuredRuns, arguments: _Arguments, default_page: Path, wanted: int) -> None:
    """Print the comparison of the runs, and write its page."""
    remarks = [*slow_instances(runs.measured)]
    if runs.are_limited:
        remarks.append(
            "--timeout ended some runs before their programs had ended; the table shows the speed "
            "of these runs until then"
        )
    if len(runs.measured) < wanted:
        remarks.append(
            f"only {len(runs.measured)} of {wanted} runs {are(len(runs.measured))} measured, "
            "because a run failed or was stopped"
        )
    comparison = compare(runs.measured, grouped=True, remarks=remarks)
    from poprun_py.past_runs.comparison_tables import scaling_lines
    from poprun_py.past_runs.pages.comparison_page import scaling_page

    print_comparison(comparison, arguments.form, scaling_lines)
    flush_stdout()
    path = Path(arguments.output) if arguments.output is not None else default_page
    save_page(path, scaling_page(comparison, arguments.counts))
