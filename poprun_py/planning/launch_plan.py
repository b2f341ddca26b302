"""The class LaunchPlan, which describes a whole launch before the launch starts.

A launch plan can be shown, saved in a file (plan_file.py), and launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from poprun_py.display.public_values import Displayed
from poprun_py.errors import UsageError
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.machines.host_list import slurm_tasks
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement, place_instances
from poprun_py.planning.hosts_and_mpi import PlanInputs, is_described
from poprun_py.planning.instance_variables import (
    PLANNED_THREADS,
    Pairs,
    mpi_environment,
    planned_variables,
    settings_for_other_hosts,
    user_variables,
)
from poprun_py.planning.instances_on_hosts import Instance, Topology
from poprun_py.planning.mpi_commands import (
    command_for_some,
    make_command,
    split_mpi_arguments,
    variables_set_by,
)

if TYPE_CHECKING:
    from poprun_py.planning.partition_decision import PartitionDecision


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlan:
    """The planned replicas, IPUs, CPUs and environment variables of one instance.

    The variables of ``env`` are part of the mpirun command line. The variables of ``user_env`` come
    from --env and --env-file. The launcher sends ``user_env`` to the wrapper of the instance.
    ``unset`` contains the names of variables that only the MPI arguments of other instances set.
    In this instance, variables of ``unset`` are as in the launcher's environment.
    """

    instance: Instance
    placement: Placement
    env: Pairs
    user_env: Pairs = field(default=(), repr=False)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchPlan(Displayed):
    """The plan of a launch, with its options, its topology, its instances and its mpirun command.

    Attributes:
        config: The options of the launch.
        topology: The hosts, and the instances, replicas and IPUs of each host.
        machines: The hardware of each host; None for a host with unknown hardware.
        instances: The plan of each instance.
        command: The command line of mpirun.
        environ: The environment variables of the launcher that makes and launches the plan.
        compact: Whether the mpirun command has one part for all instances, because a command with
            one part for each instance would be too long for the kernel. If ``compact`` is True, the
            launcher sends the environment variables to the instances.
        user_threads: The thread counts that the user set in environment variables, by variable.
        network: The network between the hosts; empty if the network is not known.
        refusal: An error text that says why the plan cannot be launched, for example because the
            job does not fit the machines; empty if the plan can be launched.
        hostnames: A map from the name of a host in the options to the name that the host reports.
        folder: The working folder of the job; empty for the working folder of the launcher.
        partition: The decision about the IPU partition; None if no pod is configured. When the plan
            is launched, the launcher decides about the IPU partition again.
    """

    config: LaunchConfig
    topology: Topology
    machines: tuple[Machine | None, ...]
    instances: tuple[InstancePlan, ...]
    command: tuple[str, ...]
    # The environment may contain secrets, so the repr does not contain the environment.
    environ: Mapping[str, str] = field(repr=False)
    compact: bool = False
    user_threads: Mapping[str, int] = field(default_factory=dict)
    network: str = ""
    refusal: str = ""
    hostnames: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    partition: PartitionDecision | None = None

    def __repr__(self) -> str:
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
        """The launcher's environment variables that instances on other hosts need.

        If all instances run on this machine, no variables are returned, because the instances
        inherit the launcher's environment.
        """
        if not self.spans_hosts:
            return {}
        by_user = split_mpi_arguments(self.config)[1].names_for_any(self.environ)
        return settings_for_other_hosts(self.config, self.environ, by_user)

    def channel_variables(self, index: int) -> dict[str, str | None]:
        """Return the environment variables that the launcher sends to the wrapper of an instance.

        Variables with the value None are unset in the instance. The variables of --env are sent,
        because the mpirun command does not contain the variables of --env. Variables that only
        the MPI arguments of another instance set are sent, because Open MPI would otherwise pass
        the value of the other instance to this instance. All variables of the instance
        are sent if the plan is ``compact``, or if a wrapper of an earlier attempt may run another
        instance (--memory-checkpoints).
        """
        instance = self.instances[index]
        return {
            **{name: self.environ.get(name) for name in instance.unset},
            **(dict(instance.env) if self.compact or self.config.memory_checkpoints else {}),
            **dict(instance.user_env),
        }

    def command_for(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the mpirun command that starts only some instances.

        The plan is not ``compact``, because a compact command does not say which instances it
        starts.
        """
        hosts = [self.topology.hosts[each.instance.host_index].name for each in self.instances]
        return command_for_some(self.command, hosts, indices)

    def instance_label(self, index: int) -> str:
        """Return a label of an instance, such as ``instance 1 (replicas 4-7)``."""
        replicas = self.topology.instances[index].replicas
        first, last = replicas.start, replicas.stop - 1
        span = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"instance {index} ({span})"

    def require_fit(self) -> None:
        """Raise UsageError if the plan cannot be launched."""
        if self.refusal:
            raise UsageError(self.refusal)


def make_plan(inputs: PlanInputs) -> LaunchPlan:
    """Make the plan of a launch from the inputs of the plan.

    If the job does not fit the machines of the hosts, ``refusal`` of the plan is an error text.
    If the hardware of a host is not known, the instances on the host are not bound to CPUs.

    Raises:
        UsageError: The job does not fit the machines that an option such as --hardware describes.
    """
    config, topology, environ = inputs.config, inputs.topology, dict(inputs.environ)
    mpi_arguments = split_mpi_arguments(config)[1]
    placements, refusal = place_instances(config, topology, inputs.machines)
    if refusal and is_described(config):
        raise UsageError(refusal)
    user_env = user_variables(config, inputs.env_file_text, environ)
    for_any = mpi_arguments.names_for_any(environ)
    instances = []
    planned = planned_variables(inputs, placements, user_env)
    for instance, placement, variables in zip(topology.instances, placements, planned, strict=True):
        local_args = mpi_arguments.local(instance.index)
        by_user = variables_set_by(local_args, environ)
        # If the mpirun command sets a variable twice, Open MPI uses the first value. The plan
        # therefore sets no variable that the user's -x arguments set.
        env = tuple(pair for pair in variables if pair[0] not in by_user)
        counts = user_thread_counts(local_args, user_env, environ)
        threads = counts.get(PLANNED_THREADS, placement.threads)
        instances.append(
            InstancePlan(
                instance=instance,
                placement=replace(placement, threads=threads),
                env=env,
                user_env=user_env,
                unset=tuple(sorted(for_any.difference(by_user, dict(env)))),
            )
        )
    command, compact = make_command(inputs, [each.env for each in instances])
    probed = inputs.probed
    return LaunchPlan(
        config=config,
        topology=topology,
        machines=inputs.machines,
        instances=tuple(instances),
        command=command,
        environ=environ,
        compact=compact,
        user_threads=user_thread_counts(mpi_arguments.of_every_instance, user_env, environ),
        network=probed.network.name if probed is not None else "",
        refusal=refusal,
        hostnames=probed.hostnames if probed is not None else {},
        folder=inputs.folder,
        partition=inputs.partition,
    )


def user_thread_counts(
    local_args: Sequence[str], user_env: Pairs, environ: Mapping[str, str]
) -> dict[str, int]:
    """Return the thread counts that the user set for an instance, by environment variable.

    Values of --env take precedence over values of the MPI arguments ``local_args``, because the
    wrapper of the instance sets the variables of --env after mpirun. Variables whose values are not
    numbers are left out. If a value is a list of counts, one for each level of nested OpenMP
    regions, the first count is used.
    """
    sources = (dict(user_env), variables_set_by(local_args, environ), environ)
    counts = {}
    for name in THREAD_VARIABLES:
        text = next((source[name] for source in sources if name in source), "")
        first = text.partition(",")[0].strip()
        if first.isascii() and first.isdigit() and len(first) < 10:
            counts[name] = int(first)
    return counts
