"""LaunchPlan, which describes a launch completely before it starts.

A plan can be shown, saved in a file, and launched. ``make_plan`` computes the plan from the
options, the hosts, their machines and the environment. plan_file.py writes plans as JSON and reads
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.display.public_values import Displayed
from poprun_py.errors import UsageError
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.machines.host_allocation import DEFAULT_HOST_FILES, slurm_tasks
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.instance_variables import (
    FORWARDED_VARIABLES,
    PLANNED_THREADS,
    TARGET_OPTIONS,
    Pairs,
    common_variables,
    mpi_environment,
    placement_variables,
    popdist_variables,
    settings_for_other_hosts,
    target_options,
    thread_counts,
    torchrun_variables,
    user_variables,
)
from poprun_py.planning.job_placement import place_instances
from poprun_py.planning.mpi_commands import (
    MPICH,
    Context,
    MpiRequest,
    escape_colon,
    is_too_long,
    make_command,
    with_one_part,
)
from poprun_py.planning.plan_inputs import PlanInputs
from poprun_py.planning.topology import Instance, Topology
from poprun_py.planning.user_mpi_arguments import (
    MpiArguments,
    split_mpi_arguments,
    variables_set_by,
)

# The module about partitions is imported for type checkers only, because a launch without a pod
# does not need the code of pods.
if TYPE_CHECKING:
    from poprun_py.planning.partition_decision import PartitionDecision

_WRAPPER = str(Path(__file__).parents[1] / "instance" / "start_wrapper.py")
# Variables that the wrapper of an instance needs to connect to the supervisor. The command
# line of mpirun contains only their names, because every user of a host can read command lines.
_TO_REMOTE = ("POPRUN_CONTROL", "POPRUN_TOKEN")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlan:
    """One instance with its replicas, IPUs, CPUs and environment variables.

    The variables of ``env`` are part of the mpirun command line. The variables of ``user_env`` come
    from --env and --env-file. The launcher sends these variables to the wrapper of the instance, so
    they are not on the command line. ``unset`` contains the names of variables that only the MPI
    arguments of other instances set. In this instance, these variables have the values of the
    launcher's environment, or are unset.
    """

    instance: Instance
    placement: Placement
    env: Pairs
    user_env: Pairs = field(default=(), repr=False)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchPlan(Displayed):
    """A whole launch with its options, its topology, its instances and the command of mpirun.

    Attributes:
        config: The options of the launch.
        topology: The hosts, and the instances, replicas and IPUs of each host.
        machines: The hardware of each host; None for a host whose hardware is not known.
        instances: The plan of each instance.
        command: The command line of mpirun.
        environ: The environment variables of the launcher that made the plan, which are also used
            when the plan is launched.
        compact: Whether the mpirun command has one part for all instances, because a command with
            one part for each instance would be too long for the kernel. For a compact command, the
            launcher sends each instance its variables.
        user_threads: The thread counts that the user set, with the names of the variables as keys.
        network: The network between the hosts; empty if it is not known.
        refusal: An error text that says why the plan cannot be launched, for example because the
            job does not fit the machines; empty if the plan can be launched.
        hostnames: A map from the names of other hosts in the options to the names that these hosts
            report for themselves.
        folder: The working folder of the job; empty for the working folder of the launcher.
        partition: The decision about the partition, which is made again when the plan is launched;
            None if no pod is configured.
    """

    config: LaunchConfig
    topology: Topology
    machines: tuple[Machine | None, ...]
    instances: tuple[InstancePlan, ...]
    command: tuple[str, ...]
    # The repr does not contain the environment, because the environment may contain secrets.
    environ: Mapping[str, str] = field(repr=False)
    compact: bool = False
    user_threads: Mapping[str, int] = field(default_factory=dict)
    network: str = ""
    refusal: str = ""
    hostnames: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    partition: PartitionDecision | None = None

    def __repr__(self) -> str:
        # The repr does not contain the machines and the command, because they are long.
        refused = f", refusal={self.refusal!r}" if self.refusal else ""
        return f"LaunchPlan({self.config!r}, hosts={len(self.topology.hosts)}{refused})"

    @property
    def spans_hosts(self) -> bool:
        """Whether instances run on machines other than the one where the launcher runs."""
        return self.topology.spans_hosts

    @property
    def mpirun_environ(self) -> dict[str, str]:
        """The environment variables of the mpirun process."""
        topology = self.topology
        slurm = (
            slurm_tasks(topology.hosts, topology.instances_per_host, self.environ)
            if self.spans_hosts
            else {}
        )
        return {**mpi_environment(self.environ), **slurm}

    @property
    def travelling_variables(self) -> dict[str, str]:
        """The launcher's variables that instances on other hosts need, such as ``POPLAR_*``.

        The result is empty for a job on this machine, because all its instances inherit the
        launcher's variables.
        """
        if not self.spans_hosts:
            return {}
        by_user = split_mpi_arguments(self.config)[1].names_for_any(self.environ)
        return settings_for_other_hosts(self.config, self.environ, by_user)

    def channel_variables(self, index: int) -> dict[str, str | None]:
        """Return the variables that the launcher sends to the wrapper of an instance.

        The value None unsets a variable. The variables of --env are sent, because
        they are not on the command line. Variables that only the MPI arguments of another instance
        set are also sent, because Open MPI would pass their values on to this instance. If the plan
        is ``compact``, all variables of the instance are sent.
        """
        instance = self.instances[index]
        return {
            **{name: self.environ.get(name) for name in instance.unset},
            **(dict(instance.env) if self.compact else {}),
            **dict(instance.user_env),
        }

    def instance_label(self, index: int) -> str:
        """Return a label of an instance for messages, such as ``instance 1 (replicas 4-7)``."""
        replicas = self.topology.instances[index].replicas
        first, last = replicas.start, replicas.stop - 1
        span = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"instance {index} ({span})"

    def require_fit(self) -> None:
        """Raise UsageError if the plan cannot be launched."""
        if self.refusal:
            raise UsageError(self.refusal)


def make_plan(
    config: LaunchConfig,
    topology: Topology,
    mpi_arguments: MpiArguments,
    inputs: PlanInputs,
    *,
    enforce: bool = True,
    partition: PartitionDecision | None = None,
) -> LaunchPlan:
    """Return the plan of a launch.

    Instances on a host whose hardware is not known are not bound to CPUs. ``partition`` is None if
    no pod is configured.

    Raises:
        UsageError: The job does not fit the machines, and ``enforce`` is True. If ``enforce`` is
            False, the plan is returned with the error text as its ``refusal``.
    """
    environ, probed = inputs.environ, inputs.probed
    placements, refusal = place_instances(config, topology, inputs.machines)
    if refusal and enforce:
        raise UsageError(refusal)
    user_env = user_variables(
        config.env,
        inputs.env_file_text,
        environ,
        env_option=config.named("env"),
        file_option=config.named("env_file"),
    )
    planned = _planned_variables(config, topology, placements, inputs, user_env, partition)
    by_user = [mpi_arguments.variables(each.index, environ) for each in topology.instances]
    for_any = mpi_arguments.names_for_any(environ)
    instances = tuple(
        _instance_plan(*each, user_env, environ, for_any)
        for each in zip(topology.instances, placements, planned, by_user, strict=True)
    )
    contexts = _contexts(config, topology, instances, mpi_arguments, by_user, environ)
    request = _mpi_request(config, topology, mpi_arguments, inputs, contexts)
    mpi = inputs.installed_mpi
    command = make_command(mpi, request)
    compact = is_too_long(command)
    return LaunchPlan(
        config=config,
        topology=topology,
        machines=inputs.machines,
        instances=instances,
        command=(
            make_command(mpi, with_one_part(request, config.named("instance_mpi_local_args")))
            if compact
            else command
        ),
        environ=dict(environ),
        compact=compact,
        user_threads=user_thread_counts(mpi_arguments.of_every_instance, user_env, environ),
        network=probed.network.name if probed is not None else "",
        refusal=refusal,
        hostnames=probed.hostnames if probed is not None else {},
        partition=partition,
    )


def user_thread_counts(
    local_args: Sequence[str], user_env: Pairs, environ: Mapping[str, str]
) -> dict[str, int]:
    """Return the thread counts that the user set for an instance, with the variables as keys.

    If a variable is in both --env and the MPI arguments ``local_args``, the value of --env counts,
    because the wrapper of the instance sets the variables of --env after mpirun.
    """
    by_mpi = variables_set_by(local_args, environ)
    return thread_counts({**environ, **by_mpi, **dict(user_env)})


def _mpi_request(
    config: LaunchConfig,
    topology: Topology,
    mpi_arguments: MpiArguments,
    inputs: PlanInputs,
    contexts: tuple[Context, ...],
) -> MpiRequest:
    """Return a description of the launch that does not depend on the MPI implementation."""
    hosts, probed, environ = topology.hosts, inputs.probed, inputs.environ
    spans_hosts = topology.spans_hosts
    named = next((host for host in hosts if host.user and not host.is_local), None)
    if named is not None and inputs.installed_mpi.kind == MPICH:
        raise UsageError(
            f"host {named.user}@{named.name}: MPICH's mpirun does not accept a user; expected only "
            "the name of the host, and its User in ~/.ssh/config"
        )
    return MpiRequest(
        contexts=contexts,
        hosts=(tuple((h.name, topology.instances_per_host) for h in hosts) if spans_hosts else ()),
        global_args=mpi_arguments.for_mpirun,
        agent=probed.shell.agent if probed is not None else (),
        network=probed.network.mpi_name if probed is not None else "",
        network_is_ours=probed is None or probed.network.includes_us,
        address=probed.network.own_address if probed is not None else "",
        is_launched_inside=any(host.is_local for host in hosts),
        ignores_slurm=not spans_hosts and "SLURM_JOBID" in environ,
        ignores_host_file=not spans_hosts and any(n in environ for n in DEFAULT_HOST_FILES),
        allow_run_as_root=config.allow_run_as_root,
        fast_start=config.mpi_fast_start
        and (not spans_hosts or (probed is not None and not probed.has_fabric)),
        grace_seconds=config.grace,
    )


def _planned_variables(
    config: LaunchConfig,
    topology: Topology,
    placements: Sequence[Placement],
    inputs: PlanInputs,
    user_env: Pairs,
    partition: PartitionDecision | None,
) -> Iterator[Pairs]:
    """Yield the environment variables of each instance, with POPLAR_TARGET_OPTIONS last."""
    environ, mpi = inputs.environ, inputs.installed_mpi
    common = common_variables(config, topology, environ, inputs.probed, mpi.library)
    inherited = {name for name in THREAD_VARIABLES if name in environ}
    bindings = placement_variables(placements, {name for name, _ in user_env} | inherited)
    target = (TARGET_OPTIONS, target_options(topology, environ))
    for instance, binding in zip(topology.instances, bindings, strict=True):
        popdist = dict((*popdist_variables(config, topology, instance), *common))
        of_partition = partition.variables(instance.index) if partition is not None else {}
        merged = {**popdist, **of_partition}
        kept = ((name, value) for name, value in merged.items() if value is not None)
        yield (*kept, *torchrun_variables(topology, instance), *binding, target)


def _instance_plan(
    instance: Instance,
    placement: Placement,
    variables: Pairs,
    by_user: Mapping[str, str],
    user_env: Pairs,
    environ: Mapping[str, str],
    for_any: frozenset[str],
) -> InstancePlan:
    """Return the plan of an instance.

    ``by_user`` are the variables that the user's -x arguments set for this instance. The plan sets
    no other values for these variables, because Open MPI uses the first value that a command gives
    a variable, and would ignore the user's value. ``for_any`` contains the names of the variables
    that -x arguments set for at least one instance.
    """
    env = tuple(pair for pair in variables if pair[0] not in by_user)
    threads = thread_counts({**environ, **by_user, **dict(user_env)})
    return InstancePlan(
        instance=instance,
        placement=replace(placement, threads=threads.get(PLANNED_THREADS, placement.threads)),
        env=env,
        user_env=user_env,
        unset=tuple(sorted(for_any.difference(by_user, dict(env)))),
    )


def _contexts(
    config: LaunchConfig,
    topology: Topology,
    instances: Sequence[InstancePlan],
    mpi_arguments: MpiArguments,
    by_user: Sequence[Mapping[str, str]],
    environ: Mapping[str, str],
) -> tuple[Context, ...]:
    """Return each instance's part of the mpirun command."""
    names = [*FORWARDED_VARIABLES, *sorted(name for name in THREAD_VARIABLES if name in environ)]
    forwarded = [name for name in names if name in environ]
    if topology.spans_hosts:
        forwarded += _TO_REMOTE
    program = (sys.executable, "-I", "-S", _WRAPPER, "--", *map(escape_colon, config.program))
    contexts = []
    for index, plan in enumerate(instances):
        contexts.append(
            Context(
                variables=tuple(pair for pair in plan.env if pair[0] != TARGET_OPTIONS),
                forwarded=tuple(name for name in forwarded if name not in by_user[index]),
                local_args=mpi_arguments.local(index),
                last_variables=tuple(pair for pair in plan.env if pair[0] == TARGET_OPTIONS),
                command=program,
            )
        )
    return tuple(contexts)
