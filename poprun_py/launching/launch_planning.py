"""Planning of a launch from its options and the current hosts, machines, MPI and pod.

This module collects the inputs of a plan. Pure functions in poprun_py/planning make the plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from poprun_py.errors import StartError, UsageError
from poprun_py.launching.job_cores import (
    lease_as_planned,
    lease_beside_others,
    leases_place,
)
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.machines.host_list import Host
from poprun_py.machines.leases import Lease
from poprun_py.machines.remote_leases import OtherJobs
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.hosts_and_mpi import (
    PlanInputs,
    gather_inputs,
    hosts_of,
    is_described,
    with_instances,
)
from poprun_py.planning.installed_mpi import Mpi
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_commands import split_mpi_arguments
from poprun_py.planning.pasted_command import check_pasted_command
from poprun_py.planning.user_program import require_program, resolve_program
from poprun_py.terminal import Console

# Only launches that use a pod import the modules about pods at run time.
if TYPE_CHECKING:
    from poprun_py.planning.partition_decision import PartitionDecision


def plan(
    config: LaunchConfig,
    *,
    environ: Mapping[str, str] | None = None,
    mpi: Mpi | None = None,
    hosts: tuple[Host, ...] | None = None,
    contact_hosts: bool = False,
) -> LaunchPlan:
    """Return the plan of everything that launching ``config`` would do, without starting anything.

    If the job does not fit the real machines, the plan has a warning, and can be shown but not
    launched. If ``config`` describes machines, and the job does not fit them, UsageError is raised.

    Args:
        config: The options of the launch.
        environ: The launcher's environment; ``os.environ`` by default.
        mpi: The MPI implementation to use; by default the installed MPI.
        hosts: The hosts for the instances; by default the hosts that ``config`` names, else the
            hosts that the environment names, else this machine.
        contact_hosts: Whether to query the hardware of the other hosts, as a launch does. If false,
            the hardware that earlier launches recorded for these hosts is used.

    Raises:
        UsageError: The options, hosts and machines do not fit together.
        StartError: No MPI is installed, a host cannot be used, or the job cannot get its IPUs.
    """
    inputs = _gather(config, environ, contact_hosts=contact_hosts, mpi=mpi, hosts=hosts)
    return make_plan(inputs)


def plan_and_lease(
    job: LaunchConfig | LaunchPlan,
    environ: Mapping[str, str] | None,
    console: Console,
    wait: Wait,
    held: contextlib.ExitStack,
    show: Callable[[LaunchPlan], None],
) -> tuple[LaunchPlan, Lease]:
    """Plan a launch on cores that no other job holds; lease the cores until ``held`` is closed.

    If ``job`` is a plan, exactly the planned cores are leased. ``show`` is called with the final
    plan: before the job waits for cores if the plan does not depend on other jobs, else when the
    job has its cores.

    Raises:
        UsageError: The options, hosts and machines do not fit together.
        StartError: A host cannot be used, or other jobs hold too many cores.
    """
    if isinstance(job, LaunchPlan):
        planned = job if environ is None else replace(job, environ=environ)
        with inside(planned.folder):
            require_start(planned)
        show(planned)
        return planned, lease_as_planned(planned, console, wait, held)
    inputs = _gather(job, environ, contact_hosts=True)
    planned = make_plan(inputs)
    # The options and the program are checked before the job waits for cores: an error in the
    # options must not surface after hours of waiting.
    require_start(planned)
    if is_described(job):
        # If the options describe a machine, exactly the planned CPUs are leased. The job is not
        # planned again for other CPUs, even if other jobs hold the planned CPUs.
        show(planned)
        return planned, lease_as_planned(planned, console, wait, held)
    machines, lease = lease_beside_others(planned, jobs_of_others(inputs), console, wait, held)
    if machines != planned.machines:
        planned = make_plan(replace(inputs, machines=machines))
    show(planned)
    return planned, lease


def require_start(planned: LaunchPlan) -> None:
    """Check that a plan fits the machines, and that its program can be started.

    Raises:
        StartError: The program does not exist, or cannot be run.
        UsageError: The plan does not fit the machines.
    """
    planned.require_fit()
    # The program is searched for in an instance's PATH, as the instance's wrapper process does.
    environ = {**planned.environ, **dict(planned.instances[0].user_env)}
    require_program(planned.config.program, environ)


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Run a ``with`` block in a plan's folder, because the user's paths are relative to it.

    Raises:
        StartError: The plan's folder does not exist any more.
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
                f"the working folder {folder} of the plan cannot be entered ({error.strerror}); "
                "create the folder, or make a new plan"
            ) from None
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def _working_folder() -> str:
    """Return the working folder of this process; empty if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109 (a path need not be valid Unicode)
    except OSError:
        return ""


# --- inputs of a plan -----------------------------------------------------------------------------


def jobs_of_others(inputs: PlanInputs) -> Mapping[str, OtherJobs]:
    """Return the jobs that hold or await cores of other hosts; empty if leases are turned off."""
    probed = inputs.probed
    return {} if probed is None or leases_place() is None else probed.other_jobs


def _gather(
    config: LaunchConfig,
    environ: Mapping[str, str] | None,
    *,
    contact_hosts: bool,
    mpi: Mpi | None = None,
    hosts: tuple[Host, ...] | None = None,
) -> PlanInputs:
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    environ = os.environ if environ is None else environ
    check_pasted_command(config)
    config = replace(config, program=resolve_program(config.program))
    # Errors in the options are reported before any host is contacted.
    found = hosts_of(config, environ) if hosts is None else hosts
    if config.nproc_per_node is not None:
        config = with_instances(config, found)
        # With --nproc-per-node, the hosts determine the number of instances. ``hosts_of`` is called
        # again because it checks a scheduler's allocation against the number of instances.
        found = hosts_of(config, environ) if hosts is None else hosts
    config, _ = split_mpi_arguments(config)
    partition = _partition_of(config, environ, is_launch=contact_hosts)
    num_ilds = None if partition is None else partition.num_ilds
    if num_ilds is not None and config.num_instances % num_ilds:
        num_ilds = None
    topology = make_topology(config, found, num_ilds=num_ilds)
    inputs = gather_inputs(config, topology, environ, contact=contact_hosts, mpi=mpi)
    return replace(inputs, partition=partition, folder=_working_folder())


def _partition_of(
    config: LaunchConfig, environ: Mapping[str, str], *, is_launch: bool
) -> PartitionDecision | None:
    """Decide which partition of the pod a launch uses; return None if no pod is configured.

    Raises:
        StartError: The launch cannot get its IPUs, even if it waits for other jobs.
    """
    from poprun_py.launching.job_ipus import planned_partition

    use = planned_partition(config, environ)
    # A job does not wait for IPUs until it has its cores. The fixed order (cores before IPUs)
    # prevents deadlock between jobs.
    may_wait = use is not None and use.busy and config.wait_for_resources is not None
    if use is not None and is_launch and use.is_refused and not may_wait:
        raise StartError(use.reason)
    return use
