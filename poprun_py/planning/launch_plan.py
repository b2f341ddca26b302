"""LaunchPlan: everything that a launch will do, as a value that can be printed, saved and run.

Made by pure functions of the configuration, the hosts, their machines and the environment. Nothing
is started here. As JSON: plan_file.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.errors import UsageError
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.machines.allocation import DEFAULT_HOST_FILES, slurm_tasks
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement, PlacementPolicy, place_anyway
from poprun_py.planning.instance_variables import (
    FORWARDED_VARIABLES,
    PLANNED_THREADS,
    TARGET_OPTIONS,
    Pairs,
    common_variables,
    mpi_environment,
    placement_variables,
    target_options,
    torchrun_variables,
    travelling_variables,
    user_threads,
    user_variables,
    wire_variables,
)
from poprun_py.planning.mpi_arguments import (
    MpiArguments,
    names_set_by,
    split_mpi_arguments,
    variables_set_by,
)
from poprun_py.planning.mpi_commands import (
    MPICH,
    Context,
    MpiRequest,
    collapsed,
    is_too_long,
    make_command,
    shield,
)
from poprun_py.planning.plan_inputs import PlanInputs
from poprun_py.planning.topology import Instance, Topology
from poprun_py.value_display import Displayed

# A launch without a pod does not wait for it.
if TYPE_CHECKING:
    from poprun_py.planning.partition_decision import PartitionDecision

_WRAPPER = str(Path(__file__).parents[1] / "instance" / "start_wrapper.py")
# The supervisor's own, forwarded by name: everyone on a host can read a value on a command line.
_TO_REMOTE = ("POPRUN_CONTROL", "POPRUN_TOKEN")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlan:
    """One instance: what it owns, where it runs, and its variables.

    ``env`` stands on the command; ``user_env`` (from --env and --env-file) never does: it travels
    to the instance over the launcher's own channel. ``unset`` names what only other instances are
    given: this one keeps the launcher's own value, or none.
    """

    instance: Instance
    placement: Placement
    env: Pairs
    user_env: Pairs = field(default=(), repr=False)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchPlan(Displayed):
    """The whole launch: configuration, topology, instances, and the command that starts them.

    A command for thousands of instances is too long for the kernel. It is then ``compact``: one
    part for all instances, and the launcher sends each its variables. ``environ`` is the
    launcher's environment when the plan was made; no other one is looked at when it runs. It runs
    in ``folder``, where it was made; empty for wherever it is launched.
    ``hostnames`` is what hosts of a job on others call themselves, where that is known. ``refusal``
    says why the job may be looked at but not run: the machines cannot take it, or a saved plan
    lacks values; empty if it may. ``partition`` is what the launch would do with which partition of
    the pod, as it was then; None where no pod is configured. It is decided anew when the plan runs.
    ``user_threads`` are the thread counts that the user set, by variable.
    """

    config: LaunchConfig
    topology: Topology
    machines: tuple[Machine | None, ...]
    instances: tuple[InstancePlan, ...]
    command: tuple[str, ...]
    # Holds secrets: never shown.
    environ: Mapping[str, str] = field(repr=False)
    compact: bool = False
    user_threads: Mapping[str, int] = field(default_factory=dict)
    network: str = ""
    refusal: str = ""
    hostnames: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    partition: PartitionDecision | None = None

    def __repr__(self) -> str:
        # Machines and commands are long.
        refused = f", refusal={self.refusal!r}" if self.refusal else ""
        return f"LaunchPlan({self.config!r}, hosts={len(self.topology.hosts)}{refused})"

    @property
    def spans_hosts(self) -> bool:
        """Tell whether instances run on other machines than this one."""
        return _spans_hosts(self.topology)

    @property
    def mpirun_environ(self) -> dict[str, str]:
        """The environment of mpirun."""
        topology = self.topology
        slurm = (
            slurm_tasks(topology.hosts, topology.instances_per_host, self.environ)
            if self.spans_hosts
            else {}
        )
        return {**mpi_environment(self.environ), **slurm}

    @property
    def travelling_variables(self) -> dict[str, str]:
        """The launcher's settings of our libraries, sent to all instances of a job on other hosts.

        On this machine instances inherit them.
        """
        if not self.spans_hosts:
            return {}
        arguments = split_mpi_arguments(self.config)[1]
        by_user = names_set_by(arguments.of_every_instance, self.environ).union(
            *(names_set_by(words, self.environ) for words in arguments.of_instance.values())
        )
        return travelling_variables(self.config, self.environ, by_user)

    def channel_variables(self, index: int) -> dict[str, str | None]:
        """Return the variables that the launcher sends an instance; None unsets one.

        Those of --env stand on no command. Those that another instance's arguments set would reach
        this one too: Open MPI gives every part what one part sets.
        """
        p = self.instances[index]
        return {
            **{name: self.environ.get(name) for name in p.unset},
            **(dict(p.env) if self.compact else {}),
            **dict(p.user_env),
        }

    def instance_label(self, index: int) -> str:
        """Return the name of an instance with its replicas: ``instance 1 (replicas 4-7)``."""
        replicas = self.topology.instances[index].replicas
        first, last = replicas.start, replicas.stop - 1
        span = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"instance {index} ({span})"

    def require_fit(self) -> None:
        """Refuse to run a plan that was made to be looked at.

        Raises:
            UsageError: the machines cannot take the job, with the numbers; or values are missing.
        """
        if self.refusal:
            raise UsageError(self.refusal)


def _spans_hosts(topology: Topology) -> bool:
    return not all(host.is_local for host in topology.hosts)


def make_plan(
    config: LaunchConfig,
    topology: Topology,
    mpi_arguments: MpiArguments,
    inputs: PlanInputs,
    *,
    enforce: bool = True,
    partition: PartitionDecision | None = None,
) -> LaunchPlan:
    """Plan the launch of ``config``.

    Args:
        config: what is asked for.
        topology: who is on which host.
        mpi_arguments: the MPI arguments of ``config``.
        inputs: what is known of the hosts of ``topology``; nothing is bound on an unknown machine.
        enforce: refuse what does not fit the machines; else the plan keeps the ``refusal``.
        partition: what is done with which partition; None without a pod.

    Raises:
        UsageError: what is asked for does not fit the hosts or machines.
    """
    environ, reached, mpi = inputs.environ, inputs.reached, inputs.installed_mpi
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
    instances, contexts = _instances(
        config,
        topology,
        placements,
        mpi_arguments,
        user_env,
        environ,
        common_variables(config, topology, environ, reached, mpi.library),
        partition,
    )
    request = _mpi_request(config, topology, mpi_arguments, inputs, contexts)
    command = make_command(mpi, request)
    compact = is_too_long(command)
    return LaunchPlan(
        config=config,
        topology=topology,
        machines=inputs.machines,
        instances=instances,
        command=(
            make_command(mpi, collapsed(request, config.named("instance_mpi_local_args")))
            if compact
            else command
        ),
        environ=dict(environ),
        compact=compact,
        user_threads=threads_by_user(mpi_arguments.of_every_instance, user_env, environ),
        network=reached.network if reached is not None else "",
        refusal=refusal,
        hostnames=reached.hostnames if reached is not None else {},
        partition=partition,
    )


def threads_by_user(
    local_args: Sequence[str], user_env: Pairs, environ: Mapping[str, str]
) -> dict[str, int]:
    """Return the thread counts that an instance gets from the user, by variable.

    A variable of --env overrides one that mpirun's ``local_args`` set, because the launcher's
    channel sets it last.
    """
    by_mpi = variables_set_by(local_args, environ)
    return user_threads({**environ, **by_mpi, **dict(user_env)})


def _mpi_request(
    config: LaunchConfig,
    topology: Topology,
    mpi_arguments: MpiArguments,
    inputs: PlanInputs,
    contexts: tuple[Context, ...],
) -> MpiRequest:
    """Return the launch in the terms of the dialects."""
    hosts, reached, environ = topology.hosts, inputs.reached, inputs.environ
    spans_hosts = _spans_hosts(topology)
    named = next((host for host in hosts if host.user and not host.is_local), None)
    if named is not None and inputs.installed_mpi.kind == MPICH:
        raise UsageError(
            f"host {named.user}@{named.name}: MPICH's mpirun takes no user; expected the name of "
            "the host alone, and its User in ~/.ssh/config"
        )
    return MpiRequest(
        contexts=contexts,
        hosts=(tuple((h.name, topology.instances_per_host) for h in hosts) if spans_hosts else ()),
        global_args=mpi_arguments.for_mpirun,
        agent=reached.shell.agent if reached is not None else (),
        network=reached.mpi_network if reached is not None else "",
        network_is_ours=reached is None or reached.shares_network,
        address=reached.own_address if reached is not None else "",
        is_launched_inside=any(host.is_local for host in hosts),
        ignores_slurm=not spans_hosts and "SLURM_JOBID" in environ,
        ignores_host_file=not spans_hosts and any(n in environ for n in DEFAULT_HOST_FILES),
        allow_run_as_root=config.allow_run_as_root,
        fast_start=config.mpi_fast_start
        and (not spans_hosts or (reached is not None and not reached.has_fabric)),
        grace_seconds=config.grace,
    )


def _instances(
    config: LaunchConfig,
    topology: Topology,
    placements: Sequence[Placement],
    mpi_arguments: MpiArguments,
    user_env: Pairs,
    environ: Mapping[str, str],
    common: Pairs,
    partition: PartitionDecision | None,
) -> tuple[tuple[InstancePlan, ...], tuple[Context, ...]]:
    """Give every instance its variables, and its part of the command.

    What the user's own -x arguments set is left to them: Open MPI takes the first value of a name.
    """
    by_everyone = names_set_by(mpi_arguments.of_every_instance, environ)
    by_user = {
        index: by_everyone | names_set_by(words, environ)
        for index, words in mpi_arguments.of_instance.items()
    }
    by_any_user = by_everyone.union(*by_user.values())
    inherited = {name for name in THREAD_VARIABLES if name in environ}
    bound = placement_variables(placements, {name for name, _ in user_env} | inherited)
    target = (TARGET_OPTIONS, target_options(topology, environ))
    spans_hosts = _spans_hosts(topology)
    by_name = [
        name
        for name in (
            *FORWARDED_VARIABLES,
            *sorted(inherited),
            *(_TO_REMOTE if spans_hosts else ()),
        )
        if name in environ or name in _TO_REMOTE
    ]
    program = (sys.executable, "-I", "-S", _WRAPPER, "--", *map(shield, config.program))
    instances, contexts = [], []
    for instance, placement, binding in zip(topology.instances, placements, bound, strict=True):
        theirs = by_user.get(instance.index, by_everyone)
        wire = (*wire_variables(config, topology, instance), *common)
        env = tuple(
            pair
            for pair in (
                *(wire if partition is None else _of_partition(wire, partition, instance.index)),
                *torchrun_variables(topology, instance),
                *binding,
            )
            if pair[0] not in theirs
        )
        threads = threads_by_user(mpi_arguments.local(instance.index), user_env, environ)
        last = () if target[0] in theirs else (target,)
        ours = {name for name, _ in env}
        instances.append(
            InstancePlan(
                instance=instance,
                placement=replace(
                    placement, threads=threads.get(PLANNED_THREADS, placement.threads)
                ),
                env=(*env, *last),
                user_env=user_env,
                unset=tuple(sorted(by_any_user - theirs - ours - {target[0]})),
            )
        )
        contexts.append(
            Context(
                variables=env,
                forwarded=tuple(name for name in by_name if name not in theirs),
                local_args=mpi_arguments.local(instance.index),
                last_variables=last,
                command=program,
            )
        )
    return tuple(instances), tuple(contexts)


def _of_partition(pairs: Pairs, use: PartitionDecision, instance: int) -> Pairs:
    """Return variables of an instance with what is known of its partition already."""
    if not use.name:
        return pairs
    from poprun_py.planning.partition_variables import known_variables

    name = None if use.is_temporary else use.name  # that of the process which runs the plan
    known = known_variables(
        use.where, name, is_reconfigurable=use.is_reconfigurable, gcd=use.gcd(instance)
    )
    merged: dict[str, str | None] = {**dict(pairs), **known}
    return tuple((n, value) for n, value in merged.items() if value is not None)


def place_instances(
    config: LaunchConfig, topology: Topology, machines: tuple[Machine | None, ...]
) -> tuple[list[Placement], str]:
    """Place every host's instances on its machine; equal machines are placed once.

    Returns:
        The placements, and why the first machine that cannot take its instances refuses them.
    """
    mode = config.process_placement
    if config.numa_aware is not None:
        mode = "roundrobin" if config.numa_aware else "disabled"
    policy = PlacementPolicy(
        mode=mode,
        cores_per_instance=config.cores_per_instance,
        reserve_cores=config.reserve_cores,
        smt=config.smt,
        oversubscribe=config.oversubscribe,
        cores_option=config.named("cores_per_instance"),
        reserve_option=config.named("reserve_cores"),
    )
    share = topology.instances_per_host
    unknown = (Placement(numa_nodes=(), memory_nodes=(), cpus=(), threads=0),) * share
    done: dict[int, tuple[Placement, ...]] = {}
    placements: list[Placement] = []
    refusals: list[str] = []
    for machine in machines:
        if machine is None:
            placements += unknown
            continue
        if id(machine) not in done:
            done[id(machine)], refusal = place_anyway(machine, share, policy)
            refusals += [refusal] if refusal else []
        placements += done[id(machine)]
    return placements, "".join(refusals[:1])
