"""Plans a launch, and runs one: ``launch(config)`` is ``run(plan(config))``.

config -> inputs -> plan -> command -> supervisor -> result
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from poprun_py.attempts import Attempts
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.console import Callbacks, Console, Log
from poprun_py.errors import StartError, TimeLimitError, UsageError
from poprun_py.hardware.reader import Machine
from poprun_py.hosts.host_list import Host
from poprun_py.leases.book import Lease
from poprun_py.leasing import lease_share
from poprun_py.planning.inputs import (
    Inputs,
    Purpose,
    gather_inputs,
    hosts_of,
    is_described,
    with_instances,
)
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_arguments import MpiArguments, split_mpi_arguments
from poprun_py.planning.mpi_commands import Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.shared_machine import Share, beside, taken_of
from poprun_py.planning.topology import Topology, make_topology
from poprun_py.planning.user_program import require_program, resolve_program
from poprun_py.recording.run_recording import RunRecording
from poprun_py.supervision.restart import lost_hosts, run_with_restarts
from poprun_py.supervision.supervisor import LaunchResult

__all__ = ["Console", "launch", "lease", "plan", "plan_leased", "run"]


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
    return _gathered(config, environ, mpi, hosts, contact_hosts).plan()


def plan_leased(
    config: LaunchConfig,
    console: Console,
    *,
    environ: Mapping[str, str] | None = None,
    progress: Log | None = None,
) -> tuple[LaunchPlan, Lease]:
    """Plan a launch beside the jobs that run on this machine, and lease what it takes of it.

    Args:
        config: what is asked for.
        console: takes what others hold.
        environ: the launcher's environment; ``os.environ`` by default.
        progress: takes whom the job waits for, again and again, and at last an empty line.

    Raises:
        UsageError: the options, hosts and machines do not fit together.
        StartError: a host cannot take part, or others hold too much of this machine.
    """
    gathered = _gathered(config, environ, None, None, contact_hosts=True)
    alone = gathered.plan()
    alone.require_fit()
    # Nobody waits for hours to be told of a slip.
    _require_program(alone)
    if is_described(config):
        # It is bound to the CPUs of another machine's plan, whoever has them here.
        return alone, lease(alone, console, progress=progress)
    topology, machines = gathered.topology, gathered.inputs.machines
    share, held = lease_share(
        gathered.config,
        _whole(alone),
        partial(beside, gathered.config, topology, machines),
        console,
        progress,
    )
    try:
        if share.machines == machines:
            return alone, held
        return gathered.plan(share.machines), held
    except BaseException:
        held.close()
        raise


def lease(planned: LaunchPlan, console: Console, *, progress: Log | None = None) -> Lease:
    """Lease exactly what a plan takes of this machine; args and errors as of ``plan_leased``."""
    whole = _whole(planned)
    # Of a plan for another machine only what is here can be held.
    here = frozenset(os.sched_getaffinity(0)) & whole.cpus
    whole = whole._replace(cpus=here)
    return lease_share(
        planned.config,
        whole,
        lambda held: whole if whole.cpus.isdisjoint(held) else None,
        console,
        progress,
    )[1]


def _whole(planned: LaunchPlan) -> Share:
    placements = tuple(p.placement for p in planned.instances)
    return taken_of(planned.topology, planned.machines, placements)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What a plan is made of; planning again on other machines asks nobody."""

    config: LaunchConfig
    topology: Topology
    mpi_arguments: MpiArguments
    inputs: Inputs

    def plan(self, machines: tuple[Machine | None, ...] | None = None) -> LaunchPlan:
        inputs = self.inputs if machines is None else replace(self.inputs, machines=machines)
        made = make_plan(
            self.config,
            self.topology,
            self.mpi_arguments,
            inputs,
            enforce=is_described(self.config),
        )
        return replace(made, folder=_working_folder())


def _gathered(
    config: LaunchConfig,
    environ: Mapping[str, str] | None,
    mpi: Mpi | None,
    hosts: tuple[Host, ...] | None,
    contact_hosts: bool,
) -> _Gathered:
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    environ = os.environ if environ is None else environ
    config = replace(config, program=resolve_program(config.program))
    # What is wrong with the options alone is refused before any host is asked.
    found = hosts_of(config, environ) if hosts is None else hosts
    if config.nproc_per_node is not None:
        config = with_instances(config, found)
        # An allocation is compared with the number of instances, which is known now.
        found = hosts_of(config, environ) if hosts is None else hosts
    config, mpi_arguments = split_mpi_arguments(config)
    topology = make_topology(config, found)
    purpose = Purpose.LAUNCH if contact_hosts else Purpose.DRY_RUN
    inputs = gather_inputs(config, environ, purpose, hosts=topology.hosts, mpi=mpi)
    return _Gathered(config, topology, mpi_arguments, inputs)


def _working_folder() -> str:
    """Return the folder in which this process is; empty if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109 (of any bytes, and without an object)
    except OSError:
        return ""


def without_lost_hosts(
    planned: LaunchPlan, result: LaunchResult, warn: Log, held: Lease | None = None
) -> LaunchPlan:
    """Plan the same job on the hosts that are left; the old plan where that is not possible.

    Of this machine it takes what it ``held`` before.
    """
    hosts = planned.topology.hosts
    lost = lost_hosts(result, lambda i: hosts[planned.instances[i].instance.host_index].name)
    left = tuple(host for host in hosts if host.name not in lost)
    if not lost or not left:
        return planned
    try:
        gathered = _gathered(planned.config, planned.environ, None, left, contact_hosts=True)
        fewer = gathered.plan(_within(gathered, held))
        fewer.require_fit()
    except (UsageError, StartError) as error:
        warn(f"the job does not fit on the hosts without {', '.join(sorted(lost))}: {error}")
        return planned
    warn(f"going on without {', '.join(sorted(lost))}")
    return fewer


def _within(gathered: _Gathered, held: Lease | None) -> tuple[Machine | None, ...]:
    """Return the machines of the hosts, of this one only what is leased."""
    machines = gathered.inputs.machines
    if held is None or not held.cpus:
        return machines
    return tuple(
        replace(m, held_cpus=m.allowed_cpus.difference(held.cpus)) if host.is_local and m else m
        for host, m in zip(gathered.topology.hosts, machines, strict=True)
    )


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
    console = Callbacks(log, warn, tell_binding or log, tell=log)
    held = None
    if not isinstance(job, LaunchPlan):
        job, held = plan_leased(job, console, environ=environ)
    elif environ is not None:
        job = replace(job, environ=dict(environ))
    return run(job, console, descriptors=descriptors, held=held)


def run(
    planned: LaunchPlan,
    console: Console,
    *,
    descriptors: tuple[int, int] = (1, 2),
    held: Lease | None = None,
    progress: Log | None = None,
) -> LaunchResult:
    """Run a plan to its end, again after a failure if it may be; nothing of it is left running.

    Meanwhile this process is in the folder in which the plan was made.

    Args:
        planned: what to run; everything that decides it stands in there.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.
        held: what the job has leased of this machine, given back at its end; by default what the
            plan takes is leased now.
        progress: takes whom the job waits for, if it has to; an empty line at last.

    Raises:
        UsageError: the machines cannot take the job; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    with contextlib.ExitStack() as at_end:
        if held is not None:
            at_end.enter_context(held)
        _require_main_thread()
        planned.require_fit()
        for warning in plan_warnings(planned):
            console.warn(warning)
        with _inside(planned.folder):
            _require_program(planned)
            if held is None:
                held = at_end.enter_context(lease(planned, console, progress=progress))
            result = _run_here(planned, console, descriptors, held)
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Be in a plan's folder: paths that the user gave are relative to it.

    Raises:
        StartError: it is gone.
    """
    if folder in ("", _working_folder()):
        yield
        return
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.chdir(folder)
        except OSError as error:
            raise StartError(
                f"the plan runs in the folder {folder} where it was made: {error.strerror}; make "
                "the folder, or make a new plan"
            ) from None
        try:
            yield
        finally:
            os.fchdir(before)
    finally:
        os.close(before)


def _require_program(planned: LaunchPlan) -> None:
    # The wrapper looks for the program as the instance that it is in front of: with its PATH.
    environ = {**planned.environ, **dict(planned.instances[0].user_env)}
    require_program(planned.config.program, environ)


def _run_here(
    planned: LaunchPlan, console: Console, descriptors: tuple[int, int], held: Lease
) -> LaunchResult:
    config = planned.config
    if planned.network:
        console.log(f"the hosts talk to one another over {planned.network}")
    with contextlib.closing(RunRecording(planned, console)) as recording:
        held.name_run(recording.run_id)
        replan = partial(without_lost_hosts, held=held)
        attempts = Attempts(planned, recording, console, descriptors, replan)
        result = run_with_restarts(
            attempts.run, config.max_restarts, attempts.failed, attempts.pause
        )
        recording.finish(result)
    return replace(result, run_id=recording.run_id, was_interrupted=recording.was_interrupted)


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError("a job can be launched from the main thread only, which gets the signals")
