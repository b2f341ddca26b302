"""New plans of a job whose hosts change between two attempts.

The number of replicas never changes. If the replicas are those of PopTorch models, the job may get
another number of instances: each instance then runs more or fewer replicas. In other programs,
such as programs with DistributedDataParallel, the processes are the replicas. A job of this kind
keeps its number of instances, and the instances share cores if too few cores are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from popdist_py.environment import DETERMINISTIC
from popdist_py.errors import counted
from poprun_py.errors import StartError, UsageError
from poprun_py.launching.job_cores import left_by_others
from poprun_py.launching.launch_planning import jobs_of_others
from poprun_py.machines.host_list import Host
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.hosts_and_mpi import PlanInputs, gather_inputs
from poprun_py.planning.instances_on_hosts import Topology, make_topology
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.running.supervise.launch_result import LaunchResult


def lost_hosts(planned: LaunchPlan, result: LaunchResult) -> tuple[Host, ...]:
    """Return the hosts of an attempt from which no instance has reported its end."""
    reported = {
        planned.instances[each.index].instance.host_index
        for each in result.instances
        if each.code is not None and not each.was_lost
    }
    return tuple(h for index, h in enumerate(planned.topology.hosts) if index not in reported)


def plan_on_hosts(
    first: LaunchPlan,
    hosts: Sequence[Host],
    *,
    may_change: bool,
    cpus: Collection[int] = (),
    own: Collection[str] = (),
    contact: bool = True,
) -> LaunchPlan:
    """Plan a job on other hosts, on as many of them as possible.

    Args:
        first: The plan of the job's first attempt.
        hosts: The hosts that can be used, in the order of their instances.
        may_change: Whether the job may have another number of instances.
        cpus: The CPUs that the job has leased on this machine.
        own: The names of the hosts on which wrappers of the job hold leases.
        contact: Whether to probe the hosts even if their reports are stored.

    Raises:
        UsageError: The job does not fit on these hosts.
        StartError: A host cannot be used, or other jobs hold its cores.
    """
    from poprun_py.machines.host_reports import cached_reports

    # All hosts are probed once. Only the hosts of this topology are used here.
    topology = replace(first.topology, hosts=tuple(hosts), idle_hosts=())
    others = [host for host in hosts if not host.is_local]
    contact = contact or len(cached_reports(others)) < len(others)
    inputs = gather_inputs(first.config, topology, first.environ, contact=contact)
    # The job keeps its partition of IPUs on other hosts.
    inputs = replace(inputs, partition=first.partition, folder=first.folder)
    problem: UsageError | StartError | None = None
    for config, num_hosts in _divisions(first, len(hosts), may_change=may_change):
        try:
            return _plan(first, _on_first_hosts(inputs, config, num_hosts, first), cpus, own)
        except (UsageError, StartError) as error:
            problem = problem or error
    assert problem is not None  # one host is a possible choice for any job
    raise problem


def _divisions(
    first: LaunchPlan, num_hosts: int, *, may_change: bool
) -> Iterator[tuple[LaunchConfig, int]]:
    """Yield the options of a job and the number of hosts that it uses, the best choice first."""
    topology, config = first.topology, first.config
    if may_change:
        keeps_wrappers = config.memory_checkpoints
        for used, instances in divisions(topology, num_hosts, keeps_wrappers=keeps_wrappers):
            yield with_instances(config, instances), used
        return
    possible = [used for used in range(num_hosts, 0, -1) if not config.num_instances % used]
    yield from ((config, used) for used in possible)
    # Fewer instances would train with fewer replicas, so the instances share cores instead.
    shared = replace(config, oversubscribe=True, cores_per_instance=None, reserve_cores=0)
    yield from ((shared, used) for used in possible)


def divisions(
    topology: Topology, num_hosts: int, *, keeps_wrappers: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield numbers of hosts and instances for a job, with as many hosts and instances as possible.

    The instances can be divided evenly over the hosts, and the replicas evenly over the instances.
    No host gets more instances than in ``topology`` on as many hosts, or than in ``topology`` with
    fewer hosts. If the hosts that are left keep their wrappers, no host gets additional instances,
    because the programs of new wrappers start seconds later.
    """
    replicas = topology.num_replicas
    for used in range(num_hosts, 0, -1):
        counted_hosts = used if keeps_wrappers else max(used, len(topology.hosts))
        most = topology.instances_per_host * counted_hosts
        most -= most % used
        yield from ((used, number) for number in range(most, 0, -used) if replicas % number == 0)


def with_instances(config: LaunchConfig, number: int) -> LaunchConfig:
    """Return the options of a job with another number of instances and the same replicas.

    Options that name instances that do not exist any more name other instances.

    Raises:
        UsageError: An option does not permit this number of instances.
    """
    shown = config.only_output_from_instance
    return replace(
        config,
        num_instances=number,
        stdin_instance=config.stdin_instance if config.stdin_instance < number else 0,
        only_output_from_instance=shown and (tuple(i for i in shown if i < number) or (0,)),
    )


def _on_first_hosts(
    inputs: PlanInputs, config: LaunchConfig, num_hosts: int, first: LaunchPlan
) -> PlanInputs:
    """Return the inputs of a plan with other options on the first hosts of ``inputs``."""
    hosts = inputs.topology.hosts[:num_hosts]
    if config.oversubscribe and not first.config.oversubscribe:
        hosts = tuple(replace(host, slots=None) for host in hosts)
    num_ilds: int | None = first.topology.num_ilds
    if first.partition is None and config.num_instances % first.topology.num_ilds:
        num_ilds = None
    topology = make_topology(config, hosts, num_ilds=num_ilds)
    machines = inputs.machines[:num_hosts]
    return replace(inputs, config=config, topology=topology, machines=machines)


def _plan(
    first: LaunchPlan, inputs: PlanInputs, cpus: Collection[int], own: Collection[str]
) -> LaunchPlan:
    """Make a plan in which this machine has only the leased ``cpus``.

    The hosts ``own`` have the cores that they had in the first plan, if they were part of it.

    Raises:
        UsageError: The job does not fit on these hosts.
        StartError: Other jobs hold too many cores of a host.
    """
    hosts = inputs.topology.hosts
    jobs = {name: each for name, each in jobs_of_others(inputs).items() if name not in own}
    free = left_by_others(make_plan(inputs), jobs).machines
    before = list(zip(first.topology.hosts, first.machines, strict=True))
    known = {host.name: machine for host, machine in before if host.name in own}
    free = tuple(known.get(h.name, machine) for h, machine in zip(hosts, free, strict=True))
    here = (machine for host, machine in before if host.is_local and machine)
    sharing = next((machine.sharing_jobs for machine in here), ())
    machines = tuple(
        replace(
            machine,
            held_cpus=machine.allowed_cpus.difference(cpus),
            sharing_jobs=sharing,
        )
        if cpus and host.is_local and machine
        else machine
        for host, machine in zip(hosts, free, strict=True)
    )
    planned = make_plan(replace(inputs, machines=machines))
    planned.require_fit()
    return planned


def change_json(before: LaunchPlan, after: LaunchPlan) -> dict[str, Any]:
    """Return how the hosts of a job change between two attempts, for report.json; else empty."""
    old, new = ([h.name for h in each.topology.hosts] for each in (before, after))
    if old == new:
        return {}
    variables = {**after.environ, **dict(after.instances[0].user_env)}
    return {
        "lost": [name for name in old if name not in new],
        "joined": [name for name in new if name not in old],
        "num_instances_before": before.topology.num_instances,
        "num_instances": after.topology.num_instances,
        "is_deterministic": variables.get(DETERMINISTIC) == "1",
    }


def change_text(before: LaunchPlan, after: LaunchPlan) -> str:
    """Return how the number of instances changes, or that instances share cores; else no text."""
    if after.topology.num_instances != before.topology.num_instances:
        return (
            f"{counted(after.topology.num_instances, 'instance')} with "
            f"{counted(after.topology.num_local_replicas, 'replica')} each, instead of "
            f"{counted(before.topology.num_instances, 'instance')}"
        )
    if after.config.oversubscribe and not before.config.oversubscribe:
        return "the instances share cores, because fewer instances would train with fewer replicas"
    return ""
