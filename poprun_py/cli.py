"""The command ``poprun-py``: words -> configuration -> what was asked for -> exit code.

The only module that exits; terminal.py prints. Heavy imports happen where they are needed:
``--help`` must answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from poprun_py.command_name import command_name
from poprun_py.config.command_line import parse
from poprun_py.config.launch_config import LaunchConfig, is_decided_by_plan, options
from poprun_py.config.option_kinds import option_name
from poprun_py.errors import LaunchError, StartError, TimeLimitError, UsageError
from poprun_py.terminal import (
    Terminal,
    UnwritableError,
    can_print,
    flush_stdout,
    open_closed_descriptors,
    print_any_text,
    print_error,
    print_out,
    print_problem,
    print_warning,
    wants_colour,
)

if TYPE_CHECKING:
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.supervision.supervisor import LaunchResult
    from poprun_py.views.drawing import Look

__all__ = ["main", "run"]


# Modules of poprun_py/commands, each with main(words) -> exit code, and its click command.
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
    open_closed_descriptors()
    print_any_text()
    # What is made before the job starts lives until the end: collecting it would only cost time.
    gc.disable()
    code = run(sys.argv[1:])
    # Nothing is left to interrupt: another Ctrl-C must not change the code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Finalising the interpreter would take longer than everything else that is left to do.
    os._exit(code)


def _complete(name: str) -> NoReturn:
    """Answer the shell that completes a command line of ours."""
    from poprun_py.config.command_line import COMMAND

    # The words as far as they are typed, as the shells' own scripts hand them over.
    typed = os.environ.get("COMP_WORDS", "").split()[1:2]
    if typed and typed[0] in COMMANDS:
        import click

        module = importlib.import_module(f"poprun_py.commands.{typed[0]}")
        own = getattr(module, typed[0].upper())
        click.Group(name, commands={typed[0]: own}).main(prog_name=name)
    COMMAND.main(prog_name=name)
    sys.exit(0)


def run(words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code."""
    try:
        code = _command(words) if words[:1] and words[0] in COMMANDS else _run(parse(words))
        flush_stdout()
        return code
    except LaunchError as error:
        print_problem(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except UnwritableError as error:
        # Nothing more can be printed: the interpreter's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error.reason, BrokenPipeError):
            # The reader of our output has gone: a message would reach nobody.
            return 141
        print_problem(f"standard output cannot be written: {error.reason.strerror}")
        return StartError.exit_code
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:
            print_problem("the working folder was deleted; change to one that exists")
        else:
            print_problem(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return StartError.exit_code


def _command(words: Sequence[str]) -> int:
    """Do what a command beside the launch is for; a program of such a name is run as ./NAME."""
    module = importlib.import_module(f"poprun_py.commands.{words[0]}")
    code: int = module.main(words[1:])
    return code


def _run(values: dict[str, Any]) -> int:
    topic = values.pop("help", None)
    if topic is not None:
        from poprun_py.config.help_pages import help_text

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
        _export_config(config)
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
    from poprun_py.planning.option_sources import gather_options

    gathered = gather_options(values, os.environ)
    for warning in gathered.warnings:
        print_warning(warning)
    log = Terminal(is_verbose=gathered.config.verbosity >= 1, prints_bindings=False)
    for line in gathered.log:
        log.log(line)
    return gathered.config


def _export_config(config: LaunchConfig) -> None:
    from poprun_py.config.files import dump_config

    assert config.export_config is not None
    path = Path(config.export_config)
    text = dump_config(config, config.export_config)
    option = config.named("export_config")
    if path.exists() and not config.overwrite_config:
        raise UsageError(
            f"{option} {path}: the file exists; name another or add --overwrite-config yes"
        )
    _write_private(path, text, option)


def _write_private(path: Path, text: str, option: str) -> None:
    """Write a file that only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def _launch(config: LaunchConfig) -> int:
    """Show what was asked for, then run unless only that was wanted."""
    if config.stacks is not None:
        from poprun_py.supervision.inspection import ask

        if stacks := ask(config.stacks):
            print_out(stacks.removesuffix("\n"))
        return 0
    if config.status is not None:
        return _print_status(config)
    if config.check:
        return _check_hosts(config)
    if config.print_hardware is not None:
        _print_hardware(config)
        if not config.program and config.from_plan is None:
            return 0
    planned = _plan(config)
    inspected = _inspect(config, planned)
    is_only_saved = config.export_plan is not None and not config.run
    has_no_job = inspected and not planned.config.program and not config.run
    if config.dry_run or config.prints_file or is_only_saved or has_no_job:
        from poprun_py.planning.plan_warnings import plan_warnings

        for warning in plan_warnings(planned):
            print_warning(warning)
        return 0
    if not planned.config.program and config.export_config is not None:
        return 0
    return _run_plan(config, planned)


def _run_plan(config: LaunchConfig, planned: LaunchPlan) -> int:
    """Run a plan and say how it ended."""
    from poprun_py import launcher

    console = Terminal(
        is_verbose=config.verbosity >= 1, prints_bindings=config.print_topology in _READ_BACK
    )
    if config.verbosity >= 1:
        from poprun_py.views.command_text import folded

        console.log(f"running: {folded(planned.command)}")
    started = time.monotonic()
    gc.enable()
    try:
        result = launcher.run(planned, console)
    except TimeLimitError as error:
        result = cast("LaunchResult", error.result)
    console.log(f"ended with exit code {result.exit_code} after {time.monotonic() - started:.2f} s")
    _print_summary(config, result)
    if result.exit_code != 0:
        from poprun_py.views.report import report_text

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
        from poprun_py.observation.job_view import summary_lines

        for line in summary_lines(view):
            print_error(f"{command_name()}: {line}")


def _print_status(config: LaunchConfig) -> int:
    """Print how the instances of a running job are doing."""
    import json

    from poprun_py.observation.job_view import JobView, table_lines
    from poprun_py.supervision.inspection import NEWEST, ask_status

    job = config.status
    assert job is not None
    if job == NEWEST and len(config.program) == 1:
        job = config.program[0]  # without the equals sign
    status, others = ask_status(job)
    if config.status_format == "json":
        print_out(json.dumps(status, indent=2))
        return 0
    # A pipe gets whole lines, a terminal what fits.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    lines = table_lines(JobView.from_json(status), width=width, colour=wants_colour())
    text = "\n".join(lines)
    print_out(text if can_print(text) else text.replace("─", "-"))
    if others:
        pids = ", ".join(map(str, others))
        print_error(f"{command_name()}: other jobs run too: --status={pids}")
    return 0


def _check_hosts(config: LaunchConfig) -> int:
    """Print the table of --check; a red cell is a launch that could not start."""
    from poprun_py.hosts.survey import check_hosts
    from poprun_py.planning.inputs import Purpose, gather_inputs
    from poprun_py.planning.user_program import resolve_program
    from poprun_py.views.check_table import check_table

    config = replace(config, program=resolve_program(config.program))
    inputs = gather_inputs(config, os.environ, Purpose.CHECK)
    checked = check_hosts(
        config, inputs.hosts, mpirun=inputs.installed_mpi.path, environ=inputs.environ
    )
    print_out(check_table(checked, colour=wants_colour()))
    return 0 if checked.is_well else StartError.exit_code


def _plan(config: LaunchConfig) -> LaunchPlan:
    """Make the plan or load it; one that is only looked at may be meant for a larger machine."""
    has_no_program = not config.program and config.from_plan is None
    only_looking = config.dry_run or config.prints_file or has_no_program
    if config.from_plan is not None:
        planned = _load_plan(config)
        planned = replace(planned, config=replace(planned.config, live=config.live))
    else:
        from poprun_py import launcher

        planned = launcher.plan(config, contact_hosts=not only_looking)
    if not only_looking:
        planned.require_fit()
    return planned


def _load_plan(config: LaunchConfig) -> LaunchPlan:
    import json

    from poprun_py.planning.inputs import read_text_file
    from poprun_py.planning.plan_file import plan_from_json

    assert config.from_plan is not None
    if config.program:
        raise UsageError(
            f"{config.named('from_plan')} and the program {config.program[0]!r} exclude one "
            "another: the plan names its program"
        )
    text = read_text_file(config.from_plan, config.named("from_plan"))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{config.shown('from_plan')}: not JSON ({error})") from None
    return plan_from_json(data, os.environ)


def _inspect(config: LaunchConfig, planned: LaunchPlan) -> bool:
    """Print what the inspection options ask for; tells whether there was any."""
    if config.export_plan == "-":
        # Standard output is then a file of JSON: nothing else goes there.
        _export_plan("-", "", planned)
        return True
    form = config.print_topology
    if form == "no" and (config.dry_run or config.verbosity >= 2):
        form = "yes"
    if form != "no":
        print_out(_topology(form, planned))
    if config.export_plan is not None:
        _export_plan(config.export_plan, config.named("export_plan"), planned)
    if config.dry_run and not config.prints_file:
        from poprun_py.views.command_text import folded

        print_out(folded(planned.command))
    flush_stdout()
    return form != "no" or config.export_plan is not None


def _topology(form: str, planned: LaunchPlan) -> str:
    """Return the topology in one of its forms."""
    from poprun_py.views import topology_text

    if form == "tree":
        from poprun_py.views.topology_tree import topology_tree

        return topology_tree(planned, _look())
    if form == "svg":
        from poprun_py.views.plan_picture import plan_picture

        return plan_picture(planned)
    if form == "html":
        from poprun_py.views.plan_page import plan_page

        return plan_page(planned)
    if form == "cores":
        return topology_text.core_pictures(planned, _look())
    if form == "json":
        return topology_text.topology_json(planned)
    width = _look().width
    is_large = planned.topology.num_replicas > topology_text.UNASKED_REPLICAS
    if width is None and is_large and planned.config.print_topology == "no":
        width = topology_text.UNASKED_WIDTH
    return topology_text.topology_table(planned.topology, max_width=width)


def _look() -> Look:
    """Return how pictures are drawn on standard output."""
    from poprun_py.views.drawing import BOX_CHARACTERS, Look

    return Look(
        colour=wants_colour(),
        box_lines=can_print(BOX_CHARACTERS),
        width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None,
    )


def _export_plan(path: str, option: str, planned: LaunchPlan) -> None:
    import json

    from poprun_py.planning.plan_file import plan_to_json, portable

    text = json.dumps(plan_to_json(portable(planned)), indent=2)
    if path == "-":
        print_out(text)
    else:
        _write_private(Path(path), text + "\n", option)


def _print_hardware(config: LaunchConfig) -> None:
    import json

    from poprun_py.planning.inputs import Purpose, gather_inputs
    from poprun_py.views.hardware_table import hardware_table

    look = _look()
    inputs = gather_inputs(config, os.environ, Purpose.HARDWARE)
    hosts = inputs.hosts
    machines = [(h, m) for h, m in zip(hosts, inputs.machines, strict=True) if m is not None]
    if config.print_hardware == "json":
        document = (
            machines[0][1].to_json()
            if len(hosts) == 1 and machines
            else {"hosts": {host.name: machine.to_json() for host, machine in machines}}
        )
        print_out(json.dumps(document, indent=2))
        return
    for host, machine in machines:
        if len(hosts) > 1:
            print_out(look.paint(f"{host.name}:", "host"))
        print_out(hardware_table(machine, look))
