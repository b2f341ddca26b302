"""The command ``poprun-py``, from its command line to its exit code.

Each function imports the modules that it needs, so that ``poprun-py --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from poprun_py.errors import UsageError
from poprun_py.options.command_line import parse
from poprun_py.options.declared_options import OF_THIS_LAUNCH, OPTIONS, is_decided_by_plan
from poprun_py.options.option_types import option_name
from poprun_py.terminal import (
    Console,
    command_name,
    exit_code_of,
    exit_with,
    may_be_lost,
    prepare_streams,
    print_error,
    print_out,
    print_warning,
)

if TYPE_CHECKING:
    from poprun_py.options.launch_config import LaunchConfig
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.running.supervise.launch_result import LaunchResult

# The subcommands. Each subcommand has a module with ``main(words)`` and a click command.
COMMANDS = ("jobs", "stop", "runs", "report", "compare", "scale")
# The values of --print-topology that show CPUs. With --print-topology tree or cores, the launcher
# also prints the CPUs that the kernel reports for each instance.
_READ_BACK = ("tree", "cores")
# The numbers of training steps and seconds from which a summary of a job's time is printed.
_TOLD_STEPS, _TOLD_SECONDS = 10, 60.0


def main() -> NoReturn:
    """Run ``poprun-py`` with this process's arguments, and exit with the command's exit code."""
    name = command_name()
    # The shell asks for completions by setting an environment variable that click defines.
    if f"_{name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        _complete(name)
    prepare_streams()
    # Collecting garbage before the job starts is useless: all objects live until the job ends.
    gc.disable()
    exit_with(run(sys.argv[1:]))


def _complete(name: str) -> NoReturn:
    """Print the completions of a command line for the shell."""
    from poprun_py.options.help_pages import COMMAND

    # click's completion scripts pass the words that the user has typed in COMP_WORDS.
    typed = os.environ.get("COMP_WORDS", "").split()[1:2]
    if typed and typed[0] in COMMANDS:
        import click

        module = importlib.import_module(f"poprun_py.command.{typed[0]}")
        own = getattr(module, typed[0].upper())
        click.Group(name, commands={typed[0]: own}).main(prog_name=name)
    COMMAND.main(prog_name=name)
    sys.exit(0)


def run(words: Sequence[str]) -> int:
    """Run the command line ``words`` and return the exit code."""
    is_beside = bool(words) and words[0] in COMMANDS
    return exit_code_of(lambda: _command(words) if is_beside else _run(parse(words)))


def _command(words: Sequence[str]) -> int:
    """Run a subcommand. To launch a program that is named like a subcommand, users type ./NAME."""
    module = importlib.import_module(f"poprun_py.command.{words[0]}")
    code: int = module.main(words[1:])
    return code


def _run(values: dict[str, Any]) -> int:
    topic = values.pop("help", None)
    if topic in COMMANDS:
        return _command([topic, "--help"])
    if topic is not None:
        from poprun_py.options.help_pages import MANUAL, help_text

        if topic == MANUAL:
            from poprun_py.command.manual import show_manual

            if show_manual():
                return 0
            topic = "all"  # without the page or the program man, this help has the most text
        print_out(help_text(topic, shutil.get_terminal_size((100, 24)).columns))
        return 0
    version_format = values.pop("version_format", None)
    if values.pop("version", False) or version_format is not None:
        from poprun_py.versions import version_text

        print_out(version_text(version_format or "text"))
        return 0
    names_change = values.pop("names_change", None)
    if names_change is not None:
        from poprun_py.command.names_change import change_names

        change_names(names_change, is_alone=not any(values.values()))
        return 0
    _check_plan_alone(values)
    config = _configuration(values)
    if config.export_config is not None or config.export_plan is not None:
        from poprun_py.command.show_and_export import check_exports

        check_exports(config)
    if config.export_config is not None:
        from poprun_py.command.show_and_export import export_config

        export_config(config)
        if config.export_config == "-" and not config.run:
            return 0  # another program reads the options from stdout, so no job writes there
    return _launch(config)


def _check_plan_alone(values: dict[str, Any]) -> None:
    """Raise UsageError for an option that the plan of --from-plan already decides."""
    decided = [name for name in OPTIONS if name in values and is_decided_by_plan(name)]
    if values.get("from_plan") is not None and decided:
        raise UsageError(
            f"--from-plan and {option_name(decided[0])} cannot be used together, because the saved "
            f"plan already decides {option_name(decided[0])}; omit the option, or make a new plan "
            "with --export-plan"
        )


def _configuration(values: dict[str, Any]) -> LaunchConfig:
    """Merge the options from files, environment variables and the command line; log the sources."""
    from poprun_py.options.gathered_options import gather_options

    gathered = gather_options(values, os.environ)
    for warning in gathered.warnings:
        print_warning(warning)
    _log_options(gathered.config, typed=False)
    return gathered.config


def _log_options(config: LaunchConfig, *, typed: bool) -> None:
    """Log the options of the command line (``typed``), or those of all other sources."""
    if config.verbosity >= 1:
        from poprun_py.options.given_options import lines_by_source

        console = _console(config)
        for line in lines_by_source(config, typed=typed):
            console.log(line)


def _console(config: LaunchConfig) -> Console:
    return Console(
        is_verbose=config.verbosity >= 1, prints_bindings=config.print_topology in _READ_BACK
    )


def _launch(config: LaunchConfig) -> int:
    """Print facts about jobs or machines, show a plan, or run a job, as the options say."""
    from poprun_py.command import show_and_export
    from poprun_py.launching.launch_planning import plan

    if (code := _query(config)) is not None:
        return code
    if config.check:
        return show_and_export.print_check(config)
    if config.print_hardware is not None:
        if not config.program and config.from_plan is None:
            show_and_export.print_hardware(config)
            return 0
        with may_be_lost():
            show_and_export.print_hardware(config)
    saved = None if config.from_plan is None else _load_plan(config)
    has_program = bool(config.program if saved is None else saved.config.program)
    is_only_saved = config.export_plan is not None and not config.run
    is_only_shown = config.dry_run or config.prints_file or is_only_saved
    if is_only_shown or (
        show_and_export.is_inspected(config) and not has_program and not config.run
    ):
        return _show_plan(config, saved)
    if has_program:
        return _run_job(config, saved or config)
    planned = saved or plan(config)
    if config.export_config is not None:
        return 0
    return _run_job(config, planned)  # raises UsageError, because no program was given


def _query(config: LaunchConfig) -> int | None:
    """Query or change a running job, if an option asks for this, and return the exit code."""
    from poprun_py.command import show_and_export

    if config.stacks is not None:
        show_and_export.print_stacks(config.stacks)
        return 0
    if config.status is not None:
        return show_and_export.print_status(config)
    if config.add_host is not None:
        return show_and_export.add_host(config)
    if config.print_leases is not None:
        show_and_export.print_leases(config)
        return 0
    return None


def _show_plan(config: LaunchConfig, saved: LaunchPlan | None) -> int:
    """Show or export a plan without running it. A dry run does not contact the plan's hosts."""
    from poprun_py.command import show_and_export
    from poprun_py.launching.launch_planning import plan
    from poprun_py.planning.plan_warnings import plan_warnings

    has_program = bool(config.program) or saved is not None
    is_for_here = has_program and not config.dry_run and not config.prints_file
    planned = saved or plan(config, contact_hosts=is_for_here)
    if is_for_here:
        planned.require_fit()
    _log_options(config, typed=True)
    if show_and_export.is_inspected(config):
        show_and_export.show_plan(config, planned)
    for warning in plan_warnings(planned):
        print_warning(warning)
    if planned.partition is not None:
        _console(config).log(planned.partition.sentence)
    return 0


def _run_job(config: LaunchConfig, job: LaunchConfig | LaunchPlan) -> int:
    """Launch a job and print how it ended; if the options ask for the plan, first show the plan."""
    from poprun_py.command import show_and_export
    from poprun_py.launching.launch import Request, launch

    label: Callable[[int], str] = str

    def show(planned: LaunchPlan) -> None:
        nonlocal label
        label = planned.instance_label
        # The user has just typed these options, so an error before the plan does not repeat them.
        _log_options(config, typed=True)
        if show_and_export.is_inspected(config):
            # If --export-plan is -, another program reads the plan from stdout. If the plan cannot
            # be written, the job does not start.
            is_result = config.export_plan == "-"
            with contextlib.nullcontext() if is_result else may_be_lost():
                show_and_export.show_plan(config, planned)
        gc.enable()

    result = launch(Request(job), _console(config), on_plan=show)
    _print_summary(config, result)
    if result.exit_code != 0:
        from poprun_py.launching.failure_report import report_text

        # If the user ended the job, the failure report is empty.
        if report := report_text(result, label):
            print_error(report.removesuffix("\n"))
    if result.report is not None:
        print_error(f"{command_name()}: the report is {_short_path(result.report)}")
    return result.exit_code


def _short_path(path: Path) -> Path:
    """Return a path relative to the working folder, or unchanged if it is not in this folder."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def _print_summary(config: LaunchConfig, result: LaunchResult) -> None:
    """Print how a training job spent its time, if an option asks for this or the job took long."""
    view = result.view
    is_asked = config.live or config.verbosity >= 1
    is_long = result.seconds >= _TOLD_SECONDS and sys.stderr.isatty()
    if view is None or not (is_asked or is_long):
        return
    if config.live or any(each.num_steps >= _TOLD_STEPS for each in view.instances):
        from poprun_py.running.watch.job_view import summary_lines

        for line in summary_lines(view):
            print_error(f"{command_name()}: {line}")


def _load_plan(config: LaunchConfig) -> LaunchPlan:
    from poprun_py.display.formatting import read_json
    from poprun_py.options.config_files import read_text_file
    from poprun_py.planning.plan_file import plan_from_json

    assert config.from_plan is not None
    if config.program:
        raise UsageError(
            f"{config.named('from_plan')} and the program {config.program[0]!r} cannot be used "
            "together, because the saved plan contains its program; omit the program"
        )
    text = read_text_file(config.from_plan, config.named("from_plan"))
    try:
        data = read_json(text)
    except ValueError as error:
        raise UsageError(
            f"{config.shown('from_plan')}: the file is not JSON ({error}); expected a file that "
            "--export-plan wrote"
        ) from None
    planned = plan_from_json(data, os.environ)
    given = {name: getattr(config, name) for name in ("live", *OF_THIS_LAUNCH)}
    # Error messages name the options of this launch in the form in which the user gave them.
    given["origins"] = {name: each for name, each in config.origins.items() if name in given}
    return replace(planned, config=replace(planned.config, **given))
