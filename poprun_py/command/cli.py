"""The command ``poprun-py``: words -> configuration -> what was asked for -> exit code.

The only module that exits; terminal.py prints. Heavy imports happen where they are needed:
``--help`` must answer at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from poprun_py.console import command_name
from poprun_py.errors import TimeLimitError, UsageError
from poprun_py.options.command_line import parse
from poprun_py.options.launch_config import (
    OF_THIS_LAUNCH,
    LaunchConfig,
    is_decided_by_plan,
    options,
)
from poprun_py.options.option_types import option_name
from poprun_py.terminal import (
    Terminal,
    exit_code_of,
    exit_with,
    may_be_lost,
    prepare_streams,
    print_error,
    print_out,
    print_warning,
)

if TYPE_CHECKING:
    from poprun_py.machines.leases import Lease
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.running.supervise.job import LaunchResult

# Modules of poprun_py/command, each with main(words) -> exit code, and its click command.
COMMANDS = ("report", "compare", "scale")
# Forms of the topology that show CPUs: what the kernel made of them is shown too.
_READ_BACK = ("tree", "cores")
# A shorter job is no training whose speed would matter.
_TOLD_STEPS, _TOLD_SECONDS = 10, 60.0


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    name = command_name()
    # As click spells the variable of a command's completion.
    if f"_{name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        _complete(name)
    prepare_streams()
    # What is made before the job starts lives until the end: collecting it would only cost time.
    gc.disable()
    exit_with(run(sys.argv[1:]))


def _complete(name: str) -> NoReturn:
    """Answer the shell that completes a command line of ours."""
    from poprun_py.options.command_line import COMMAND

    # The words as far as they are typed, as the shells' own scripts hand them over.
    typed = os.environ.get("COMP_WORDS", "").split()[1:2]
    if typed and typed[0] in COMMANDS:
        import click

        module = importlib.import_module(f"poprun_py.command.{typed[0]}")
        own = getattr(module, typed[0].upper())
        click.Group(name, commands={typed[0]: own}).main(prog_name=name)
    COMMAND.main(prog_name=name)
    sys.exit(0)


def run(words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code."""
    is_beside = bool(words) and words[0] in COMMANDS
    return exit_code_of(lambda: _command(words) if is_beside else _run(parse(words)))


def _command(words: Sequence[str]) -> int:
    """Do what a command beside the launch is for; a program of such a name is run as ./NAME."""
    module = importlib.import_module(f"poprun_py.command.{words[0]}")
    code: int = module.main(words[1:])
    return code


def _run(values: dict[str, Any]) -> int:
    topic = values.pop("help", None)
    if topic is not None:
        from poprun_py.options.help_pages import help_text

        print_out(help_text(topic, shutil.get_terminal_size((100, 24)).columns))
        return 0
    version_format = values.pop("version_format", None)
    if values.pop("version", False) or version_format is not None:
        from poprun_py.versions import version_text

        print_out(version_text(version_format or "text"))
        return 0
    _check_plan_alone(values)
    config = _configuration(values)
    if config.export_config is not None:
        from poprun_py.command.inspections import export_config

        export_config(config)
    return _launch(config)


def _check_plan_alone(values: dict[str, Any]) -> None:
    """Refuse what a saved plan has decided already.

    Raises:
        UsageError: --from-plan stands beside an option that makes a plan.
    """
    decided = [name for name in options() if name in values and is_decided_by_plan(name)]
    if values.get("from_plan") is not None and decided:
        raise UsageError(
            f"--from-plan and {option_name(decided[0])} exclude one another: the plan decides it; "
            "make a new one"
        )


def _configuration(values: dict[str, Any]) -> LaunchConfig:
    """Merge the places of options, and say which there are."""
    from poprun_py.options.gathered_options import gather_options

    gathered = gather_options(values, os.environ)
    for warning in gathered.warnings:
        print_warning(warning)
    log = Terminal(is_verbose=gathered.config.verbosity >= 1, prints_bindings=False)
    for line in gathered.log:
        log.log(line)
    return gathered.config


def _launch(config: LaunchConfig) -> int:
    """Show what was asked for, then run unless only that was wanted."""
    from poprun_py.command import inspections

    if config.stacks is not None:
        inspections.print_stacks(config.stacks)
        return 0
    if config.status is not None:
        return inspections.print_status(config)
    if config.print_leases is not None:
        inspections.print_leases(config)
        return 0
    if config.check:
        return inspections.print_check(config)
    if config.print_hardware is not None:
        if not config.program and config.from_plan is None:
            inspections.print_hardware(config)
            return 0
        with may_be_lost():
            inspections.print_hardware(config)
    console = Terminal(
        is_verbose=config.verbosity >= 1, prints_bindings=config.print_topology in _READ_BACK
    )
    planned, lease = _plan(config, console)
    try:
        return _show_and_run(config, planned, lease, console)
    finally:
        if lease is not None:
            lease.close()


def _show_and_run(
    config: LaunchConfig, planned: LaunchPlan, lease: Lease | None, console: Terminal
) -> int:
    """Show a plan, then run it unless only that was wanted."""
    from poprun_py.command import inspections

    inspected = inspections.is_inspected(config)
    has_no_job = inspected and not planned.config.program and not config.run
    is_only_shown = _is_only_planned(config) or has_no_job
    if inspected:
        # With --export-plan -, other programs read the plan from stdout. If it cannot be written
        # there, the job does not start.
        is_result = is_only_shown or config.export_plan == "-"
        with contextlib.nullcontext() if is_result else may_be_lost():
            inspections.show_plan(config, planned)
    if is_only_shown:
        from poprun_py.planning.plan_warnings import plan_warnings

        for warning in plan_warnings(planned):
            print_warning(warning)
        _say_partition(config, planned)
        return 0
    if not planned.config.program and config.export_config is not None:
        return 0
    return _run_plan(config, planned, lease, console)


def _say_partition(config: LaunchConfig, planned: LaunchPlan) -> None:
    """Log what a launch would do with which partition."""
    if planned.partition is not None:
        log = Terminal(is_verbose=config.verbosity >= 1, prints_bindings=False)
        log.log(planned.partition.sentence)


def _is_only_planned(config: LaunchConfig) -> bool:
    is_only_saved = config.export_plan is not None and not config.run
    return config.dry_run or config.prints_file or is_only_saved


def _run_plan(
    config: LaunchConfig, planned: LaunchPlan, lease: Lease | None, console: Terminal
) -> int:
    """Run a plan and say how it ended."""
    from poprun_py.launching import launcher

    if config.verbosity >= 1:
        from poprun_py.planning.views.command_text import folded

        console.log(f"running: {folded(planned.command)}")
    started = time.monotonic()
    gc.enable()
    try:
        result = launcher.run(planned, console, held=lease, progress=console.progress)
    except TimeLimitError as error:
        result = cast("LaunchResult", error.result)
    console.log(f"ended with exit code {result.exit_code} after {time.monotonic() - started:.2f} s")
    _print_summary(config, result)
    if result.exit_code != 0:
        from poprun_py.running.supervise.result_text import report_text

        # A job that the user ended needs no report.
        if report := report_text(result, planned.instance_label):
            print_error(report.removesuffix("\n"))
    return result.exit_code


def _print_summary(config: LaunchConfig, result: LaunchResult) -> None:
    """Say in five lines where the time of a training went, where somebody looks at it."""
    view = result.view
    is_asked = config.live or config.verbosity >= 1
    is_long = result.seconds >= _TOLD_SECONDS and sys.stderr.isatty()
    if view is None or not (is_asked or is_long):
        return
    if config.live or any(each.num_steps >= _TOLD_STEPS for each in view.instances):
        from poprun_py.running.watch.job_view import summary_lines

        for line in summary_lines(view):
            print_error(f"{command_name()}: {line}")


def _plan(config: LaunchConfig, console: Terminal) -> tuple[LaunchPlan, Lease | None]:
    """Make the plan or load it, and lease what it takes of this machine if it is to run.

    One that is only looked at may be meant for a larger machine.
    """
    from poprun_py.launching import launch_planning

    has_no_program = not config.program and config.from_plan is None
    only_looking = config.dry_run or config.prints_file or has_no_program
    if config.from_plan is not None:
        planned = _load_plan(config)
        given = {name: getattr(config, name) for name in ("live", *OF_THIS_LAUNCH)}
        planned = replace(planned, config=replace(planned.config, **given))
    elif _is_only_planned(config) or has_no_program:
        planned = launch_planning.plan(config, contact_hosts=not only_looking)
    else:
        return launch_planning.plan_leased(config, console, progress=console.progress)
    if not only_looking:
        planned.require_fit()
    # What runs as it is saved is leased when its folder and its program are known to be there.
    return planned, None


def _load_plan(config: LaunchConfig) -> LaunchPlan:
    from poprun_py.options.config_files import read_text_file
    from poprun_py.planning.plan_file import plan_from_json
    from poprun_py.texts import read_json

    assert config.from_plan is not None
    if config.program:
        raise UsageError(
            f"{config.named('from_plan')} and the program {config.program[0]!r} exclude one "
            "another: the plan names its program"
        )
    text = read_text_file(config.from_plan, config.named("from_plan"))
    try:
        data = read_json(text)
    except ValueError as error:
        raise UsageError(f"{config.shown('from_plan')}: not JSON ({error})") from None
    return plan_from_json(data, os.environ)
