"""The output of options that show or export a job, its plan or the machines.

This module does not start jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.errors import StartError, UsageError
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.run_labels import label_lines
from poprun_py.terminal import (
    can_print,
    command_name,
    flush_stdout,
    print_error,
    print_out,
    wants_colour,
)

if TYPE_CHECKING:
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.planning.views.text_drawing import TextStyle


def print_stacks(job: str) -> None:
    """Print the Python stacks of the instances of a running job."""
    from poprun_py.running.supervise.launcher_queries import ask_stacks

    if stacks := ask_stacks(job):
        print_out(stacks.removesuffix("\n"))


def add_host(config: LaunchConfig) -> int:
    """Add a host, which is the only word after the job, to a running job.

    Raises:
        UsageError: There is no host, or more than one word, after the job.
        StartError: The job is not found, or cannot use the host.
    """
    from poprun_py.running.supervise.launcher_queries import add_host as ask

    assert config.add_host is not None
    if len(config.program) != 1:
        raise UsageError(
            f"--add-host {config.add_host}: expected one host after the job, such as "
            f"--add-host {config.add_host} node4"
        )
    name = ask(config.add_host, config.program[0])
    print_out(
        f"host {name} is added to the job; the job uses the host at once if its programs keep "
        "their state in memory (--memory-checkpoints), after its next checkpoint if its programs "
        "call stopRequested(), and after its next restart otherwise"
    )
    return 0


def print_status(config: LaunchConfig) -> int:
    """Print the state of the instances of a running job."""
    from poprun_py.running.supervise.launcher_queries import NEWEST, ask_status
    from poprun_py.running.watch.job_view import JobView, table_lines

    job = config.status
    assert job is not None
    if job == NEWEST and len(config.program) == 1:
        job = config.program[0]  # the user has typed --status JOB without an equals sign
    status, others = ask_status(job)
    if config.status_format == "json":
        print_out(json.dumps(status, indent=2))
        return 0
    # Lines for a terminal are cut at the terminal's width.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    view = JobView.from_json(status)
    lines = table_lines(view, width=width, colour=wants_colour(), with_reason=True)
    lines[1:1] = label_lines(status)
    text = "\n".join(lines)
    print_out(text if can_print(text) else text.replace("─", "-"))
    if others:
        pids = ", ".join(map(str, others))
        print_error(
            f"{command_name()}: other jobs are running too; show one of them with --status=PID, "
            f"where PID is the process id of its launcher: {pids}"
        )
    return 0


def print_leases(config: LaunchConfig) -> None:
    """Print the jobs that hold CPUs of this machine, and the jobs that wait for CPUs.

    Raises:
        StartError: The leases cannot be read.
    """
    from poprun_py.launching.job_cores import leases_place
    from poprun_py.machines.lease_files import problem_text
    from poprun_py.machines.lease_messages import leases_json, leases_table
    from poprun_py.machines.leases import all_records

    place = leases_place()
    try:
        leases, queue = all_records(place)
    except OSError as error:
        problem = problem_text(error, place or Path())
        raise StartError(
            f"{config.named('print_leases')}: the leases of CPUs cannot be read: {problem}"
        ) from None
    if config.print_leases == "json":
        print_out(json.dumps(leases_json(leases, queue), indent=2))
    else:
        print_out(leases_table(leases, queue))


def print_check(config: LaunchConfig) -> int:
    """Check the hosts for --check, print a table, and return 0 if every host passed."""
    from poprun_py.machines.host_checks import check_hosts
    from poprun_py.planning.hosts_and_mpi import check_subnet, hosts_of
    from poprun_py.planning.installed_mpi import find_mpi
    from poprun_py.planning.pasted_command import check_pasted_command
    from poprun_py.planning.user_program import resolve_program
    from poprun_py.planning.views.host_tables import check_table

    check_pasted_command(config)
    config = replace(config, program=resolve_program(config.program))
    hosts = hosts_of(config, os.environ)
    check_subnet(config)
    mpi = find_mpi(config.mpi, os.environ, config.named("mpi"))
    checked = check_hosts(config, hosts, mpirun=mpi.path, environ=os.environ)
    print_out(check_table(checked, colour=wants_colour()))
    return 0 if checked.has_passed else StartError.exit_code


def print_hardware(config: LaunchConfig) -> None:
    """Print the table or the JSON document of --print-hardware."""
    from poprun_py.planning.hosts_and_mpi import hosts_of, shown_machines
    from poprun_py.planning.views.host_tables import hardware_table

    look = _look()
    hosts = hosts_of(config, os.environ)
    found = shown_machines(config, os.environ, hosts)
    machines = [(h, m) for h, m in zip(hosts, found, strict=True) if m is not None]
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


def is_inspected(config: LaunchConfig) -> bool:
    """Return whether the options show or export the plan."""
    return config.export_plan is not None or _topology_form(config) != "no"


def _topology_form(config: LaunchConfig) -> str:
    form = config.print_topology
    return "yes" if form == "no" and (config.dry_run or config.verbosity >= 2) else form


def show_plan(config: LaunchConfig, planned: LaunchPlan) -> None:
    """Print or export a plan in the forms that the options ask for."""
    if config.export_plan == "-":
        # If --export-plan is -, standard output is one JSON document without other text.
        _export_plan("-", "", planned)
        return
    form = _topology_form(config)
    if form != "no":
        print_out(_topology(form, planned))
    if config.export_plan is not None:
        _export_plan(config.export_plan, config.named("export_plan"), planned)
    if config.dry_run and not config.prints_file:
        from poprun_py.planning.views.command_text import folded

        print_out(folded(planned.command))
    flush_stdout()


def _topology(form: str, planned: LaunchPlan) -> str:
    """Return a plan's topology in the form ``form``, a value of --print-topology."""
    if form == "svg":
        from poprun_py.planning.views.plan_pictures import plan_svg

        return plan_svg(planned)
    if form == "html":
        from poprun_py.planning.views.plan_pictures import plan_page

        return plan_page(planned)
    if form in ("tree", "cores"):
        from poprun_py.planning.views.plan_text import cores_text, tree_text
        from poprun_py.planning.views.plan_tree import plan_tree

        draw = tree_text if form == "tree" else cores_text
        return draw(plan_tree(planned), _look())
    if form == "json":
        from poprun_py.planning.plan_file import topology_to_json

        return json.dumps(topology_to_json(planned), indent=2)
    from poprun_py.planning.views.plan_text import (
        UNASKED_REPLICAS,
        UNASKED_WIDTH,
        topology_table,
    )

    width = _look().width
    is_large = planned.topology.num_replicas > UNASKED_REPLICAS
    if width is None and is_large and planned.config.print_topology == "no":
        width = UNASKED_WIDTH
    return topology_table(planned.topology, max_width=width)


def _look() -> TextStyle:
    """Return the style (colour, characters, width) of text drawings on standard output."""
    from poprun_py.planning.views.text_drawing import BOX_CHARACTERS, TextStyle

    return TextStyle(
        colour=wants_colour(),
        box_lines=can_print(BOX_CHARACTERS),
        width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None,
    )


def _export_plan(path: str, option: str, planned: LaunchPlan) -> None:
    from poprun_py.planning.plan_file import plan_to_json, portable

    text = json.dumps(plan_to_json(portable(planned)), indent=2)
    if path == "-":
        print_out(text)
    else:
        _write_private(Path(path), text + "\n", option)


def check_exports(config: LaunchConfig) -> None:
    """Check the files of --export-config and --export-plan, before anything is written or started.

    Raises:
        UsageError: A file exists and --overwrite-config is not given, both options name one file,
            or the suffix of the file of --export-config is unknown.
    """
    from poprun_py.options.config_files import SUFFIXES
    from poprun_py.options.written_files import require_new

    path = config.export_config
    if path not in (None, "-") and not path.endswith(SUFFIXES):
        raise UsageError(
            f"{config.shown('export_config')}: expected a file name that ends in "
            f"{' or '.join(SUFFIXES)}, or - for standard output"
        )
    names = [name for name in ("export_config", "export_plan") if getattr(config, name) is not None]
    for name in names:
        path = getattr(config, name)
        if path != "-" and not config.overwrite_config:
            require_new(Path(path), config.shown(name), "add --overwrite-config yes")
    if len(names) == 2 and config.export_config == config.export_plan:
        raise UsageError(
            f"{config.shown('export_config')} and {config.shown('export_plan')} name the same "
            "file; give each option its own file"
        )


def export_config(config: LaunchConfig) -> None:
    """Write the options of a launch into the file that --export-config names, or to stdout.

    Raises:
        UsageError: The file cannot be written.
    """
    from poprun_py.options.config_files import config_text
    from poprun_py.options.launch_config import config_to_dict

    path = config.export_config
    assert path is not None
    # Standard output has no suffix that chooses a format.
    name = "stdout.toml" if path == "-" else path
    text = config_text(config_to_dict(config), config.origins, name)
    if path == "-":
        print_out(text.removesuffix("\n"))
    else:
        _write_private(Path(path), text, config.named("export_config"))


def _write_private(path: Path, text: str, option: str) -> None:
    """Write a file that only its owner can read; after an error, the path is as it was before."""
    from popdist_py.atomic_file import replaced_at_end

    try:
        if path.exists() and not path.is_file():
            path.write_bytes(text.encode())  # a device or a pipe, which must not be replaced
            return
        with replaced_at_end(path.resolve(), private=True) as partial:
            partial.write_bytes(text.encode())
    except OSError as error:
        raise UsageError(
            f"{option} {path}: the file cannot be written ({error.strerror})"
        ) from None
