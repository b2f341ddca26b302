"""The command ``poprun-py``: words -> configuration -> what was asked for -> exit code.

The only module that exits; terminal.py prints. Heavy imports happen where they are needed:
``--help`` must answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from poprun_py.config.command_line import parse
from poprun_py.config.launch_config import EXCLUSIVE, LaunchConfig, options
from poprun_py.config.option_kinds import option_name
from poprun_py.errors import LaunchError, StartError, TimeLimitError, UsageError
from poprun_py.terminal import (
    Terminal,
    UnwritableError,
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

__all__ = ["main", "run"]


# Forms of the topology that show CPUs: what the kernel made of them is shown too.
_READ_BACK = ("tree", "cores")


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    if "_POPRUN_PY_COMPLETE" in os.environ:
        from poprun_py.config.command_line import COMMAND

        COMMAND.main(prog_name="poprun-py")
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


def run(words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code."""
    try:
        code = _run(parse(words))
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


def _run(values: dict[str, Any]) -> int:
    if values.pop("help", False):
        from poprun_py.config.command_line import help_text

        print_out(help_text(columns=shutil.get_terminal_size((100, 24)).columns))
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
    about_configuration = ("import_config", "export_config")
    decided = [
        name
        for name, opt in options().items()
        if name in values and ((opt.saved and name != "verbosity") or name in about_configuration)
    ]
    if values.get("from_plan") is not None and decided:
        raise UsageError(
            f"--from-plan and {option_name(decided[0])} exclude one another: the plan decides it; "
            "make a new one"
        )


def _configuration(values: dict[str, Any]) -> LaunchConfig:
    """Merge a configuration file and the command line, which wins."""
    path = values.get("import_config")
    if path is None:
        return LaunchConfig(**values)
    from poprun_py.config.files import parse_config
    from poprun_py.planning.inputs import read_text_file

    imported = parse_config(read_text_file(path, "--import-config"), path)
    if not values["program"]:
        del values["program"]
    # Of two ways to say one thing, the one on the command line counts.
    for one, other in EXCLUSIVE:
        if one in values:
            imported.pop(other, None)
        if other in values:
            imported.pop(one, None)
    return LaunchConfig(**{**imported, **values})


def _export_config(config: LaunchConfig) -> None:
    from poprun_py.config.files import dump_config

    assert config.export_config is not None
    path = Path(config.export_config)
    text = dump_config(config, config.export_config)
    if path.exists() and not config.overwrite_config:
        raise UsageError(
            f"--export-config {path}: the file exists; name another or add --overwrite-config yes"
        )
    _write_private(path, text, "--export-config")


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
        from poprun_py.supervision.stacks_client import ask

        if stacks := ask(config.stacks):
            print_out(stacks.removesuffix("\n"))
        return 0
    if config.check:
        return _check_hosts(config)
    if config.print_hardware is not None:
        _print_hardware(config)
        if not config.program and config.from_plan is None:
            return 0
    planned = _plan(config)
    inspected = _inspect(config, planned)
    to_stdout = config.export_plan == "-"
    if config.dry_run or to_stdout or (inspected and not planned.config.program):
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
    console.log(f"running: {shlex.join(planned.command)}")
    started = time.monotonic()
    gc.enable()
    try:
        result = launcher.run(planned, console)
    except TimeLimitError as error:
        result = cast("LaunchResult", error.result)
    console.log(f"ended with exit code {result.exit_code} after {time.monotonic() - started:.2f} s")
    if result.exit_code != 0:
        from poprun_py.views.report import report_text

        # A job that the user ended needs no report.
        if report := report_text(result, planned.instance_label):
            print_error(report.removesuffix("\n"))
    return result.exit_code


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
    only_looking = config.dry_run or (not config.program and config.from_plan is None)
    if config.from_plan is not None:
        planned = _load_plan(config)
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
            f"--from-plan and the program {config.program[0]!r} exclude one another: the plan "
            "names its program"
        )
    text = read_text_file(config.from_plan, "--from-plan")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--from-plan {config.from_plan}: not JSON ({error})") from None
    return plan_from_json(data, os.environ)


def _inspect(config: LaunchConfig, planned: LaunchPlan) -> bool:
    """Print what the inspection options ask for; tells whether there was any."""
    if config.export_plan == "-":
        # Standard output is then a file of JSON: nothing else goes there.
        _export_plan("-", planned)
        return True
    form = config.print_topology
    if form == "no" and (config.dry_run or config.verbosity >= 2):
        form = "yes"
    if form != "no":
        print_out(_topology(form, planned))
    if config.export_plan is not None:
        _export_plan(config.export_plan, planned)
    if config.dry_run:
        print_out(shlex.join(planned.command))
    flush_stdout()
    return form != "no" or config.export_plan is not None


def _topology(form: str, planned: LaunchPlan) -> str:
    """Return the topology in one of its forms."""
    from poprun_py.views import topology_text

    if form == "tree":
        return topology_text.topology_tree(planned, colour=wants_colour())
    if form == "cores":
        return topology_text.core_pictures(planned)
    if form == "json":
        return topology_text.topology_json(planned)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return topology_text.topology_table(planned.topology, max_width=columns)


def _export_plan(path: str, planned: LaunchPlan) -> None:
    import json

    from poprun_py.planning.plan_file import plan_to_json

    text = json.dumps(plan_to_json(planned), indent=2)
    if path == "-":
        print_out(text)
    else:
        _write_private(Path(path), text + "\n", "--export-plan")


def _print_hardware(config: LaunchConfig) -> None:
    import json

    from poprun_py.planning.inputs import Purpose, gather_inputs
    from poprun_py.views.hardware_table import hardware_table

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
            print_out(f"{host.name}:")
        print_out(hardware_table(machine))
