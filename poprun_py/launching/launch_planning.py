"""Plans a launch: ``plan(config)`` gathers what there is, and asks the pure functions of planning.

config -> inputs -> plan; beside other jobs also -> lease
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from poprun_py.console import Console, Log
from poprun_py.errors import StartError, UsageError
from poprun_py.launching.leasing import Leased, lease_share, leases_place
from poprun_py.machines.host_list import Host
from poprun_py.machines.leases import Lease
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.job_placement import (
    HostShare,
    local_host_index,
    share_beside_jobs,
    share_of_placements,
)
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_arguments import MpiArguments, split_mpi_arguments
from poprun_py.planning.mpi_commands import Mpi
from poprun_py.planning.pasted_command import check_pasted_command
from poprun_py.planning.plan_inputs import (
    PlanInputs,
    Purpose,
    gather_inputs,
    hosts_of,
    is_described,
    with_instances,
)
from poprun_py.planning.topology import Topology, make_topology
from poprun_py.planning.user_program import require_program, resolve_program
from poprun_py.running.supervise.job import LaunchResult
from poprun_py.running.supervise.restart import lost_hosts

# A launch without a pod does not wait for it.
if TYPE_CHECKING:
    from poprun_py.machines.leases import OtherJobs
    from poprun_py.planning.partition_decision import PartitionDecision

_NO_POD = "none"


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
    return _gathered(config, environ, mpi, hosts, contact_hosts=contact_hosts).plan()


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
    require_start(alone)
    if is_described(config):
        # It is bound to the CPUs of another machine's plan, whoever has them here.
        return alone, lease(alone, console, progress=progress)
    share, held = _beside_others(gathered, alone, console, progress)
    try:
        if share.machines == gathered.inputs.machines:
            return alone, held
        return gathered.plan(share.machines), held
    except BaseException:
        held.close()
        raise


def _beside_others(
    gathered: _Gathered, alone: LaunchPlan, console: Console, progress: Log | None
) -> Leased:
    """Lease what the job takes of this machine; the machines are those with what others leave."""
    config, topology, machines = gathered.config, gathered.topology, gathered.inputs.machines
    whole = _whole(alone)
    reached, began = gathered.inputs.reached, time.monotonic()
    if reached is None or leases_place() is None:
        by_held = partial(share_beside_jobs, config, topology, machines)
        return lease_share(config, whole, by_held, console, progress)
    from poprun_py.launching.leasing_elsewhere import LOOK_SECONDS, left_by_others, wait_for_hosts
    from poprun_py.machines.probe import probe_other_jobs

    look = partial(
        probe_other_jobs,
        config,
        topology.hosts,
        mpirun=gathered.inputs.installed_mpi.path,
        environ=gathered.inputs.environ,
    )
    other_jobs: Mapping[str, OtherJobs] = reached.other_jobs
    while True:
        left = wait_for_hosts(
            config, topology, machines, whole.placements, other_jobs, look, console, progress, began
        )
        whole = whole._replace(machines=left)
        asked = time.monotonic()
        if local_host_index(topology) is None:
            nothing = Lease.nothing()
            nothing.waited_seconds = asked - began
            return whole, nothing
        by_held = partial(share_beside_jobs, config, topology, left)
        leased = lease_share(config, whole, by_held, console, progress, began=began)
        # Who has waited here long may have been overtaken there.
        if config.share_cores or time.monotonic() - asked < LOOK_SECONDS:
            return leased
        try:
            other_jobs = look()
            with contextlib.suppress(StartError):
                if left_by_others(config, topology, machines, other_jobs) == left:
                    return leased
        except BaseException:
            leased[1].close()
            raise
        leased[1].close()


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


def _whole(planned: LaunchPlan) -> HostShare:
    placements = tuple(p.placement for p in planned.instances)
    return share_of_placements(planned.topology, planned.machines, placements)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What a plan is made of; planning again on other machines asks nobody."""

    config: LaunchConfig
    topology: Topology
    mpi_arguments: MpiArguments
    inputs: PlanInputs
    partition: PartitionDecision | None

    def plan(self, machines: tuple[Machine | None, ...] | None = None) -> LaunchPlan:
        inputs = self.inputs if machines is None else replace(self.inputs, machines=machines)
        made = make_plan(
            self.config,
            self.topology,
            self.mpi_arguments,
            inputs,
            enforce=is_described(self.config),
            partition=self.partition,
        )
        return replace(made, folder=working_folder())


def _gathered(
    config: LaunchConfig,
    environ: Mapping[str, str] | None,
    mpi: Mpi | None,
    hosts: tuple[Host, ...] | None,
    *,
    contact_hosts: bool,
    before: LaunchPlan | None = None,
) -> _Gathered:
    """Gather what a plan needs; the partition and link domains are those of ``before``, if any."""
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    environ = os.environ if environ is None else environ
    check_pasted_command(config)
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
    return _Gathered(config, topology, mpi_arguments, inputs, partition)


def _partition_of(
    config: LaunchConfig, environ: Mapping[str, str], *, is_launch: bool
) -> PartitionDecision | None:
    """Return what a launch would do with which partition; None where no pod is configured.

    Raises:
        StartError: it is a launch, and cannot have its IPUs, not even by waiting for them.
    """
    if config.offline_mode or config.pod == _NO_POD:
        return None
    from poprun_py.launching.partition_survey import ask

    use = ask(config, environ)
    if use is not None and is_launch and use.is_refused:
        # A job that waits has its cores before its IPUs: nobody waits in a circle.
        if use.busy and config.wait_for_resources is not None:
            return use
        raise StartError(use.reason)
    return use


def _ilds_of(config: LaunchConfig, use: PartitionDecision | None) -> int | None:
    """Return the partition's IPU-Link domains, where they are known and instances divide evenly."""
    found = use.num_ilds if use is not None else None
    return found if found is not None and config.num_instances % found == 0 else None


def working_folder() -> str:
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
        # The job has its partition, and keeps it.
        gathered = _gathered(
            planned.config, planned.environ, None, left, contact_hosts=True, before=planned
        )
        fewer = gathered.plan(_within(gathered, held))
        fewer.require_fit()
    except (UsageError, StartError) as error:
        warn(f"the job does not fit on the hosts without {', '.join(sorted(lost))}: {error}")
        return planned
    warn(f"going on without {', '.join(sorted(lost))}")
    return fewer


def _within(gathered: _Gathered, held: Lease | None) -> tuple[Machine | None, ...]:
    """Return the machines of the hosts, of this one only what is leased, of others what is left.

    Raises:
        StartError: that is too little.
    """
    machines, reached = gathered.inputs.machines, gathered.inputs.reached
    if reached is not None and reached.other_jobs and leases_place() is not None:
        from poprun_py.launching.leasing_elsewhere import left_by_others

        machines = left_by_others(gathered.config, gathered.topology, machines, reached.other_jobs)
    if held is None or not held.cpus:
        return machines
    return tuple(
        replace(m, held_cpus=m.allowed_cpus.difference(held.cpus)) if host.is_local and m else m
        for host, m in zip(gathered.topology.hosts, machines, strict=True)
    )


def require_start(planned: LaunchPlan) -> None:
    """Refuse a plan whose program cannot be started.

    Raises:
        StartError: it is not there, or cannot be run.
    """
    # The wrapper looks for the program as the instance that it is in front of: with its PATH.
    environ = {**planned.environ, **dict(planned.instances[0].user_env)}
    require_program(planned.config.program, environ)
