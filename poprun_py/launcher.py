"""Plans a launch, and runs one: ``launch(config)`` is ``run(plan(config))``.

config -> inputs -> plan -> command -> supervisor -> result
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from popdist_py.environment import RESTART_COUNT
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.errors import StartError, TimeLimitError, UsageError
from poprun_py.hosts.host_list import Host
from poprun_py.output.run_folder import RunFolder
from poprun_py.planning.binding_check import check_binding
from poprun_py.planning.inputs import Purpose, gather_inputs, hosts_of, is_described
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_arguments import split_mpi_arguments
from poprun_py.planning.mpi_commands import Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.topology import make_topology
from poprun_py.planning.user_program import require_program, resolve_program, standard_input
from poprun_py.supervision.restart import lost_hosts, pause_within, run_with_restarts
from poprun_py.supervision.supervisor import Job, LaunchResult, supervise

__all__ = ["Console", "launch", "plan", "run"]

Log = Callable[[str], None]


class Console(Protocol):
    """Takes what the launcher says while a job runs."""

    def log(self, line: str, /) -> None:
        """Take a line of the launcher's own log."""

    def warn(self, sentence: str, /) -> None:
        """Take what the user should know at any verbosity."""

    def binding(self, line: str, /) -> None:
        """Take what the kernel says of an instance's binding."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    """A console made of functions."""

    log: Log
    warn: Log
    binding: Log


def _silent(_: str) -> None:
    """Log nothing."""


# --- planning -----------------------------------------------------------------------------------


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
    config = replace(config, program=resolve_program(config.program))
    # What is wrong with the options alone is refused before any host is asked.
    config, mpi_arguments = split_mpi_arguments(config)
    topology = make_topology(config, hosts_of(config, environ) if hosts is None else hosts)
    purpose = Purpose.LAUNCH if contact_hosts else Purpose.DRY_RUN
    inputs = gather_inputs(config, environ, purpose, hosts=topology.hosts, mpi=mpi)
    return make_plan(config, topology, mpi_arguments, inputs, enforce=is_described(config))


def without_lost_hosts(planned: LaunchPlan, result: LaunchResult, warn: Log) -> LaunchPlan:
    """Plan the same job on the hosts that are left; the old plan where that is not possible."""
    hosts = planned.topology.hosts
    lost = lost_hosts(result, lambda i: hosts[planned.instances[i].instance.host_index].name)
    left = tuple(host for host in hosts if host.name not in lost)
    if not lost or not left:
        return planned
    try:
        fewer = plan(planned.config, environ=planned.environ, hosts=left, contact_hosts=True)
        fewer.require_fit()
    except (UsageError, StartError) as error:
        warn(f"the job does not fit on the hosts without {', '.join(sorted(lost))}: {error}")
        return planned
    warn(f"going on without {', '.join(sorted(lost))}")
    return fewer


# --- running ------------------------------------------------------------------------------------


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
        environ: the launcher's environment; by default that of the plan, which for a configuration
            is ``os.environ``.
        warn: takes what the user should know at any verbosity.
        tell_binding: takes what the kernel says of each instance's binding; ``log`` by default.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        UsageError: the configuration does not fit hosts and machines; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    _require_main_thread()
    if not isinstance(job, LaunchPlan):
        job = plan(job, environ=environ, contact_hosts=True)
    elif environ is not None:
        job = replace(job, environ=dict(environ))
    return run(job, _Callbacks(log, warn, tell_binding or log), descriptors=descriptors)


def run(
    planned: LaunchPlan, console: Console, *, descriptors: tuple[int, int] = (1, 2)
) -> LaunchResult:
    """Run a plan to its end, again after a failure if it may be; nothing of it is left running.

    Args:
        planned: what to run; everything that decides it stands in there.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        UsageError: the machines cannot take the job; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    _require_main_thread()
    planned.require_fit()
    for warning in plan_warnings(planned):
        console.warn(warning)
    config = planned.config
    require_program(config.program, planned.environ)
    if planned.network:
        console.log(f"the hosts talk to one another over {planned.network}")
    folder = RunFolder(config.output_dir, len(planned.instances))
    folder.clear()
    attempts = _Attempts(planned, console, descriptors)
    result = run_with_restarts(
        attempts.run, config.max_restarts, attempts.failed, pause_within(config.timeout)
    )
    _save_report(folder, result, attempts.plan)
    if folder.trouble:
        console.warn(folder.trouble)
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError("a job can be launched from the main thread only, which gets the signals")


def _save_report(folder: RunFolder, result: LaunchResult, planned: LaunchPlan) -> None:
    """Write the report into the run folder, if there is one."""
    if folder.path is not None:
        from poprun_py.views.report import report_json

        report = report_json(result, planned.instance_label)
        folder.save_report(json.dumps(report, indent=2) + "\n")


class _Attempts:
    """The runs of one job, one after another; a restart may go on with another plan.

    Args:
        planned: the plan of the first run.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.
    """

    def __init__(self, planned: LaunchPlan, console: Console, descriptors: tuple[int, int]) -> None:
        self.plan = planned
        self._console = console
        self._descriptors = descriptors
        self._began = time.monotonic()

    def run(self, count: int) -> LaunchResult:
        """Run the job after ``count`` restarts."""
        planned = self.plan
        return supervise(
            _job(planned, count, time.monotonic() - self._began if count else 0.0),
            log=self._console.log,
            on_started=self._check_binding,
            descriptors=self._descriptors,
        )

    def failed(self, result: LaunchResult, restart: int, seconds: float) -> None:
        """Report a failure, and decide on which hosts restart number ``restart`` runs."""
        from poprun_py.views.report import report_text

        config, warn = self.plan.config, self._console.warn
        report = report_text(result, self.plan.instance_label)
        warn(report.removeprefix("poprun-py: ").rstrip("\n"))
        if config.allow_fewer_hosts:
            self.plan = without_lost_hosts(self.plan, result, warn)
        warn(f"restart {restart} of {config.max_restarts} in {seconds:g} s")

    def _check_binding(self, reports: dict[int, dict[str, Any]]) -> None:
        check_binding(self.plan, reports, self._console.binding, self._console.warn)


def _job(planned: LaunchPlan, restart_count: int, spent_seconds: float) -> Job:
    """Return what is to be supervised for one run of a plan."""
    config, hosts = planned.config, planned.topology.hosts
    others = [host for host in hosts if not host.is_local]
    restarts = {RESTART_COUNT: str(restart_count)} if config.max_restarts else {}
    return Job(
        command=planned.command,
        variables=tuple(
            {**restarts, **planned.channel_variables(i)} for i in range(len(planned.instances))
        ),
        environ={
            **planned.mpirun_environ,
            **(standard_input() if hosts[0].is_local else {}),
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
            planned.hostnames.get(hosts[p.instance.host_index].name, "") for p in planned.instances
        ),
        explain_failed_start=(lambda: _explain_failed_start(planned)) if others else None,
    )


def _listen_address(others: list[Host], network: str) -> str:
    """Return this machine's address that the other hosts reach."""
    from poprun_py.hosts.survey import listen_address

    return listen_address(others, network)


def _explain_failed_start(planned: LaunchPlan) -> None:
    """Ask the hosts why a launch did not start: mpirun's own words seldom name the reason.

    Raises:
        StartError: the reason, if a host shows one.
    """
    from poprun_py.hosts.survey import diagnose

    diagnose(
        planned.config,
        planned.topology.hosts,
        mpirun=planned.command[0],
        environ=planned.environ,
    )
