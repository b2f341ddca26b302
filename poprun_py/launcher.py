"""Plans a launch, and runs one: ``launch(config)`` is ``run(plan(config))``.

config -> inputs -> plan -> command -> supervisor -> result
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from poprun_py.attempts import Attempts
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.console import Callbacks, Console, Log
from poprun_py.errors import StartError, TimeLimitError, UsageError
from poprun_py.hosts.host_list import Host
from poprun_py.planning.inputs import Purpose, gather_inputs, hosts_of, is_described, with_instances
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_arguments import split_mpi_arguments
from poprun_py.planning.mpi_commands import Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.topology import make_topology
from poprun_py.planning.user_program import require_program, resolve_program, short_name
from poprun_py.recording.run_recording import RunRecording
from poprun_py.supervision.restart import lost_hosts, run_with_restarts
from poprun_py.supervision.supervisor import LaunchResult

# A launch without a pod does not wait for it.
if TYPE_CHECKING:
    from poprun_py.pods.partition_use import PartitionUse

__all__ = ["Console", "launch", "plan", "run"]


_NO_POD = "none"


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
        StartError: no MPI is installed, a host cannot take part, or the job cannot have its IPUs.
    """
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    return _plan(config, environ, mpi, hosts, contact_hosts=contact_hosts)


def _plan(
    config: LaunchConfig,
    environ: Mapping[str, str] | None,
    mpi: Mpi | None,
    hosts: tuple[Host, ...] | None,
    *,
    contact_hosts: bool,
    before: LaunchPlan | None = None,
) -> LaunchPlan:
    """Return the plan, for the partition and the link domains of the plan ``before`` if any."""
    environ = os.environ if environ is None else environ
    config = replace(config, program=resolve_program(config.program))
    # What is wrong with the options alone is refused before any host is asked.
    found = hosts_of(config, environ) if hosts is None else hosts
    if config.nproc_per_node is not None:
        config = with_instances(config, found)
        # An allocation is compared with the number of instances, which is known now.
        found = hosts_of(config, environ) if hosts is None else hosts
    config, mpi_arguments = split_mpi_arguments(config)
    if before is None:
        partition = _partition_of(config, environ, is_launch=contact_hosts)
        num_ilds = _ilds_of(config, partition)
    else:
        partition, num_ilds = before.partition, before.topology.num_ilds
    topology = make_topology(config, found, num_ilds=num_ilds)
    purpose = Purpose.LAUNCH if contact_hosts else Purpose.DRY_RUN
    inputs = gather_inputs(config, environ, purpose, hosts=topology.hosts, mpi=mpi)
    made = make_plan(
        config, topology, mpi_arguments, inputs, enforce=is_described(config), partition=partition
    )
    return replace(made, folder=_working_folder())


def _partition_of(
    config: LaunchConfig, environ: Mapping[str, str], *, is_launch: bool
) -> PartitionUse | None:
    """Return what a launch would do with which partition; None where no pod is configured.

    Raises:
        StartError: it is a launch, and cannot have its IPUs.
    """
    if config.offline_mode or config.pod == _NO_POD:
        return None
    from poprun_py.pods.asking import ask

    use = ask(config, environ)
    if use is not None and is_launch and use.is_refused:
        raise StartError(use.reason)
    return use


def _ilds_of(config: LaunchConfig, use: PartitionUse | None) -> int | None:
    """Return the partition's IPU-Link domains, where they are known and instances divide evenly."""
    found = use.num_ilds if use is not None else None
    return found if found is not None and config.num_instances % found == 0 else None


def _working_folder() -> str:
    """Return the folder in which this process is; empty if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109 (of any bytes, and without an object)
    except OSError:
        return ""


def without_lost_hosts(planned: LaunchPlan, result: LaunchResult, warn: Log) -> LaunchPlan:
    """Plan the same job on the hosts that are left; the old plan where that is not possible."""
    hosts = planned.topology.hosts
    lost = lost_hosts(result, lambda i: hosts[planned.instances[i].instance.host_index].name)
    left = tuple(host for host in hosts if host.name not in lost)
    if not lost or not left:
        return planned
    try:
        # The job has its partition, and keeps it.
        fewer = _plan(
            planned.config, planned.environ, None, left, contact_hosts=True, before=planned
        )
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
    return run(job, Callbacks(log, warn, tell_binding or log, tell=log), descriptors=descriptors)


def run(
    planned: LaunchPlan, console: Console, *, descriptors: tuple[int, int] = (1, 2)
) -> LaunchResult:
    """Run a plan to its end, again after a failure if it may be; nothing of it is left running.

    Meanwhile this process is in the folder in which the plan was made.

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
    with _inside(planned.folder):
        result = _run_here(planned, console, descriptors)
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


def _run_here(planned: LaunchPlan, console: Console, descriptors: tuple[int, int]) -> LaunchResult:
    config = planned.config
    # The wrapper looks for the program as the instance that it is in front of: with its PATH.
    require_program(config.program, {**planned.environ, **dict(planned.instances[0].user_env)})
    from poprun_py.pods.partition_lifetime import partition_for_job

    if planned.network:
        console.log(f"the hosts talk to one another over {planned.network}")
    with contextlib.closing(RunRecording(planned, console)) as recording:
        held = partition_for_job(
            config,
            planned.environ,
            console,
            run_id=recording.run_id,
            program=short_name(config.program),
            num_ilds=planned.topology.num_ilds,
        )
        with held as partition:
            attempts = Attempts(
                planned, recording, console, descriptors, without_lost_hosts, partition
            )
            result = run_with_restarts(
                attempts.run, config.max_restarts, attempts.failed, attempts.pause
            )
        recording.finish(result)
    return replace(result, run_id=recording.run_id, was_interrupted=recording.was_interrupted)


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError("a job can be launched from the main thread only, which gets the signals")
