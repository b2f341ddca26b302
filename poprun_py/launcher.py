"""The line as two short functions: plan a launch, and run one.

config -> hosts -> machines -> plan -> command -> supervisor -> result
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from popdist_py.environment import RESTART_COUNT
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.errors import StartError, TimeLimitError, UsageError
from poprun_py.hardware.reader import Machine, load_machines, read_machine
from poprun_py.hosts.host_list import Host, resolve_hosts, slurm_tasks
from poprun_py.output.run_folder import RunFolder, adopt_output_filename
from poprun_py.planning.binding_check import check_binding
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_dialects import Mpi
from poprun_py.planning.mpi_install import find_mpi
from poprun_py.planning.placement import placement_warnings
from poprun_py.planning.topology import make_topology
from poprun_py.planning.user_program import require_program, resolve_program, standard_input
from poprun_py.planning.variables import mpi_environment
from poprun_py.supervision.restart import lost_hosts, pause_within, run_with_restarts
from poprun_py.supervision.supervisor import Job, LaunchResult, supervise

__all__ = [
    "ask_machines",
    "check",
    "hosts_of",
    "instance_label",
    "launch",
    "machines_of",
    "plan",
    "plan_warnings",
    "read_text_file",
    "require_fit",
]

Log = Callable[[str], None]


def _silent(_: str) -> None:
    """Log nothing."""


def plan(
    config: LaunchConfig,
    *,
    environ: Mapping[str, str] | None = None,
    mpi: Mpi | None = None,
    hosts: tuple[Host, ...] | None = None,
    contact_hosts: bool = False,
) -> LaunchPlan:
    """Return everything that launching ``config`` would do; starts nothing of it.

    What does not fit the machines that are found is planned with a warning, since it may be meant
    for larger ones; it cannot be launched. What does not fit machines that ``config`` describes is
    refused.

    Args:
        config: what is asked for.
        environ: the launcher's environment; ``os.environ`` by default.
        mpi: the MPI to use; found by default.
        hosts: where instances may run; by default those that ``config`` names, else those of the
            environment, else this machine.
        contact_hosts: fill and ask other hosts first, as a launch does. Else they are planned for
            by what is remembered of them.

    Raises:
        UsageError: the options, hosts and machines do not fit together.
        StartError: no MPI is installed, or a host cannot take part.
    """
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    environ = os.environ if environ is None else environ
    config = adopt_output_filename(replace(config, program=resolve_program(config.program)))
    hosts = hosts_of(config, environ) if hosts is None else hosts
    # What does not divide is refused before anybody is asked.
    make_topology(config, hosts)
    mpi = mpi or find_mpi(config.mpi, environ)
    reached = None
    if not all(host.is_local for host in hosts):
        used = hosts[: config.num_instances]
        from poprun_py.hosts.survey import reach

        reached = reach(config, used, mpirun=mpi.path, environ=environ, contact=contact_hosts)
    return make_plan(
        config,
        hosts=hosts,
        machines=machines_of(config, hosts, reached.machines if reached is not None else {}),
        mpi=mpi,
        reached=reached,
        environ=environ,
        env_file_text=(
            read_text_file(config.env_file, "--env-file") if config.env_file is not None else None
        ),
        enforce=config.hardware is not None or config.hardware_root is not None,
    )


def require_fit(planned: LaunchPlan) -> None:
    """Refuse to run a plan that was made to be looked at.

    Raises:
        UsageError: the machines cannot take the job, with the numbers.
    """
    if planned.refusal:
        raise UsageError(planned.refusal)


def hosts_of(config: LaunchConfig, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that ``config`` names, else those of the environment, else this machine.

    Raises:
        UsageError: a malformed list, or one that cannot be read.
    """
    return resolve_hosts(
        host=config.host,
        host_file=config.host_file,
        environ=environ,
        read_text=lambda path: read_text_file(
            path, "--host-file" if config.host_file is not None else "host file"
        ),
        local_names=_own_names(config.host is not None or config.host_file is not None),
        num_instances=config.num_instances,
    )


def _own_names(with_addresses: bool) -> frozenset[str]:
    """Return the names of this machine: nobody needs ssh to reach it by its own address."""
    name = socket.gethostname()
    addresses: list[str] = []
    if with_addresses:
        from poprun_py.hosts.host_probe import networks

        addresses = [address for _, address, *_ in networks()]
    return frozenset({name, name.partition(".")[0], *addresses})


def launch(
    job: LaunchConfig | LaunchPlan,
    *,
    log: Log = _silent,
    environ: Mapping[str, str] | None = None,
    warn: Log = _silent,
    tell_binding: Log | None = None,
    descriptors: tuple[int, int] = (1, 2),
) -> LaunchResult:
    """Run a configuration or a plan to its end; nothing of it is left running.

    Args:
        job: what to run.
        log: takes the launcher's own log, line by line.
        environ: the launcher's environment; ``os.environ`` by default.
        warn: takes what the user should know at any verbosity.
        tell_binding: takes what the kernel says of each instance's binding; ``log`` by default.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        UsageError: the configuration does not fit hosts and machines; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError("a job can be launched from the main thread only, which gets the signals")
    environ = os.environ if environ is None else environ
    planned = job if isinstance(job, LaunchPlan) else plan(job, environ=environ, contact_hosts=True)
    require_fit(planned)
    for warning in plan_warnings(planned):
        warn(warning)
    require_program(planned.config.program, environ)
    if planned.network:
        log(f"the hosts talk to one another over {planned.network}")
    config, label = planned.config, instance_label(planned)
    folder = RunFolder(config.output_dir, len(planned.instances))
    folder.clear()
    began = time.monotonic()
    latest = planned

    def on_started(reports: dict[int, dict[str, Any]]) -> None:
        check_binding(latest, reports, tell_binding or log, warn)

    def run(restart_count: int) -> LaunchResult:
        spent = time.monotonic() - began if restart_count else 0.0
        told = {RESTART_COUNT: str(restart_count)} if config.max_restarts else {}
        return _supervise(latest, environ, log, on_started, descriptors, told, spent)

    def on_failure(result: LaunchResult, restart: int, seconds: float) -> None:
        nonlocal latest
        from poprun_py.views.report import report_text

        warn(report_text(result, label).removeprefix("poprun-py: ").rstrip("\n"))
        if config.allow_fewer_hosts:
            latest = _without_lost_hosts(latest, result, environ, warn)
        warn(f"restart {restart} of {config.max_restarts} in {seconds:g} s")

    rest = pause_within(config.timeout)
    result = run_with_restarts(run, config.max_restarts, on_failure, rest)
    _save_report(folder, result, label)
    if folder.trouble:
        warn(folder.trouble)
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


def _save_report(folder: RunFolder, result: LaunchResult, label: Callable[[int], str]) -> None:
    """Write the report into the run folder, if there is one."""
    if folder.path is not None:
        from poprun_py.views.report import report_json

        folder.save_report(json.dumps(report_json(result, label), indent=2) + "\n")


def instance_label(planned: LaunchPlan) -> Callable[[int], str]:
    """Return a function that names an instance with its replicas."""
    return lambda index: _label(planned, index)


def _without_lost_hosts(
    planned: LaunchPlan, result: LaunchResult, environ: Mapping[str, str], warn: Log
) -> LaunchPlan:
    """Plan the same job on the hosts that are left; the old plan where that is not possible."""
    hosts = planned.topology.hosts
    lost = lost_hosts(result, lambda i: hosts[planned.instances[i].instance.host_index].name)
    left = tuple(host for host in hosts if host.name not in lost)
    if not lost or not left:
        return planned
    try:
        fewer = plan(planned.config, environ=environ, hosts=left, contact_hosts=True)
        require_fit(fewer)
    except (UsageError, StartError) as error:
        warn(f"the job does not fit on the hosts without {', '.join(sorted(lost))}: {error}")
        return planned
    warn(f"going on without {', '.join(sorted(lost))}")
    return fewer


def _supervise(
    planned: LaunchPlan,
    environ: Mapping[str, str],
    log: Log,
    on_started: Callable[[dict[int, dict[str, Any]]], None],
    descriptors: tuple[int, int],
    told: Mapping[str, str],
    spent_seconds: float,
) -> LaunchResult:
    """Turn a plan into a job and run it."""
    config = planned.config
    hosts = planned.topology.hosts
    others = [host for host in hosts if not host.is_local]
    return supervise(
        Job(
            command=planned.command,
            variables=tuple(
                {**told, **planned.told(i, environ)} for i in range(len(planned.instances))
            ),
            environ={
                **mpi_environment(environ),
                **(standard_input() if hosts[0].is_local else {}),
                **(_slurm_tasks(planned, environ) if others else {}),
            },
            only_output_from=config.only_output_from_instance,
            output=config.output,
            output_dir=config.output_dir,
            timeout_seconds=config.timeout,
            spent_seconds=spent_seconds,
            hang_timeout=config.hang_timeout,
            grace_seconds=config.grace,
            listen=_listen_address(others, planned.network) if others else None,
            hosts=tuple(
                planned.hostnames.get(hosts[p.instance.host_index].name, "")
                for p in planned.instances
            ),
            explain_failed_start=((lambda: _explain_failure(planned, environ)) if others else None),
        ),
        log=log,
        on_started=on_started,
        descriptors=descriptors,
    )


def _listen_address(others: list[Host], network: str) -> str:
    """Return this machine's address that the other hosts reach."""
    from poprun_py.hosts.survey import listen_address

    return listen_address(others, network)


def _slurm_tasks(planned: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    topology = planned.topology
    return slurm_tasks(topology.hosts, topology.instances_per_host, environ)


def _explain_failure(planned: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Ask the hosts why a launch did not start: mpirun's own words seldom name the reason.

    Raises:
        StartError: the reason, if a host shows one.
    """
    hosts, mpirun = planned.topology.hosts, planned.command[0]
    from poprun_py.hosts.survey import diagnose

    diagnose(planned.config, hosts, mpirun=mpirun, environ=environ)


def plan_warnings(planned: LaunchPlan) -> tuple[str, ...]:
    """Return what is questionable about a plan, one sentence each; equal hosts are said once."""
    warnings: dict[str, None] = {}
    if planned.refusal:
        warnings[f"this can be looked at, not launched: {planned.refusal}"] = None
    topology = planned.topology
    if topology.idle_hosts:
        idle = ", ".join(host.name for host in topology.idle_hosts[:8])
        more = ", ..." if len(topology.idle_hosts) > 8 else ""
        warnings[
            f"--num-instances {topology.num_instances} leaves {len(topology.idle_hosts)} of "
            f"{len(topology.hosts) + len(topology.idle_hosts)} hosts idle: {idle}{more}"
        ] = None
    for index, machine in enumerate(planned.machines):
        if machine is None:
            continue
        share = planned.topology.instances_per_host
        placements = [p.placement for p in planned.instances[index * share : (index + 1) * share]]
        where = f"{planned.topology.hosts[index].name}: " if len(planned.machines) > 1 else ""
        for sentence in placement_warnings(machine, placements, user_threads=planned.user_threads):
            warnings[where + sentence] = None
    return tuple(warnings)


def machines_of(
    config: LaunchConfig, hosts: tuple[Host, ...], known: Mapping[str, Machine] | None = None
) -> tuple[Machine | None, ...]:
    """Return the machine behind each host; None where nothing is known of it.

    Args:
        config: names a file or folder that describes the machines, or neither.
        hosts: the hosts, in order.
        known: what other hosts reported of themselves, by name.
    """
    if config.hardware is not None:
        text = read_text_file(config.hardware, "--hardware")
        return load_machines(text, config.hardware, [host.name for host in hosts])
    if config.hardware_root is not None:
        return (read_machine(Path(config.hardware_root)),) * len(hosts)
    here = read_machine() if any(host.is_local for host in hosts) else None
    return tuple(here if host.is_local else (known or {}).get(host.name) for host in hosts)


def ask_machines(config: LaunchConfig, hosts: tuple[Host, ...]) -> Mapping[str, Machine]:
    """Ask other hosts for their hardware, unless a file describes it.

    Raises:
        StartError: a host cannot be reached.
    """
    described = config.hardware is not None or config.hardware_root is not None
    if described or all(host.is_local for host in hosts):
        return {}
    mpirun = find_mpi(config.mpi, os.environ).path
    from poprun_py.hosts.survey import reach

    return reach(config, hosts, mpirun=mpirun, environ=os.environ, contact=True).machines


def check(
    config: LaunchConfig, environ: Mapping[str, str], mark: Callable[[str], str] = str
) -> tuple[str, bool]:
    """Return the table of --check, and whether every host can take part.

    Raises:
        UsageError: options that do not fit together.
        StartError: no MPI is installed here.
    """
    config = replace(config, program=resolve_program(config.program))
    hosts = hosts_of(config, environ)
    mpirun = find_mpi(config.mpi, environ).path
    from poprun_py.hosts.survey import check_hosts

    return check_hosts(config, hosts, mpirun=mpirun, environ=environ, mark=mark)


def read_text_file(path: str, option: str) -> str:
    """Return the text of a file that an option names.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        # Editors of other systems begin a file with a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not a UTF-8 text file") from None


def _label(planned: LaunchPlan, index: int) -> str:
    instance = planned.topology.instances[index]
    first, last = instance.replicas.start, instance.replicas.stop - 1
    replicas = f"replica {first}" if first == last else f"replicas {first}-{last}"
    return f"instance {index} ({replicas})"
