"""LaunchPlan: everything that a launch will do, as a value that can be printed, saved and run.

Made by pure functions of the configuration, the hosts, their machines and the environment. Nothing
is started here. As JSON: plan_file.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.config.launch_config import LaunchConfig
from poprun_py.errors import UsageError
from poprun_py.hardware.reader import Machine
from poprun_py.hosts.host_list import DEFAULT_HOST_FILES, Host
from poprun_py.planning.mpi_dialects import (
    Context,
    Mpi,
    MpiRequest,
    collapsed,
    is_too_long,
    make_command,
    shield,
    split_args,
)
from poprun_py.planning.placement import Placement, PlacementPolicy, place_anyway
from poprun_py.planning.topology import Instance, Topology, make_topology
from poprun_py.planning.variables import (
    THREAD_VARIABLES,
    Pairs,
    common_variables,
    instance_local_args,
    placement_variables,
    set_by,
    target_options,
    torchrun_variables,
    user_threads,
    user_variables,
    wire_variables,
)

if TYPE_CHECKING:
    from poprun_py.hosts.survey import Reach

__all__ = [
    "InstancePlan",
    "LaunchPlan",
    "make_plan",
    "place_instances",
]

_WRAPPER = str(Path(__file__).parents[1] / "instance" / "main.py")
# What PopRun copies from its own environment, by name.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "POPLAR_ENGINE_OPTIONS")
# The supervisor's own, by name: a value on a command line could be read by everyone on the host.
_TO_REMOTE = ("POPRUN_CONTROL", "POPRUN_TOKEN")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlan:
    """One instance: what it owns, where it runs, and its variables.

    ``env`` stands on the command; ``user_env`` (from --env and --env-file) never does: it travels
    to the instance over the launcher's own channel. ``kept_out`` names what only other instances
    are given.
    """

    instance: Instance
    placement: Placement
    env: Pairs
    user_env: Pairs = ()
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The whole launch: configuration, topology, instances, and the command that starts them.

    A job of thousands of instances has a command too long for the kernel: it is then ``compact``,
    with one part for all instances, and the launcher tells each its variables. ``hostnames`` is
    what hosts of a job on others call themselves, where that is known. ``refusal`` says why the
    machines cannot take the job, which may be looked at but not run; empty if they can.
    """

    config: LaunchConfig
    topology: Topology
    machines: tuple[Machine | None, ...]
    instances: tuple[InstancePlan, ...]
    command: tuple[str, ...]
    compact: bool = False
    user_threads: int | None = None
    network: str = ""
    refusal: str = ""
    hostnames: Mapping[str, str] = field(default_factory=dict)

    @property
    def spans_hosts(self) -> bool:
        """Tell whether instances run on other machines than this one."""
        return not all(host.is_local for host in self.topology.hosts)

    def told(self, index: int, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables that the launcher tells an instance; None unsets one.

        Those of --env stand on no command; those that another instance's arguments set would
        reach this one too (Open MPI gives every part what one part sets).
        """
        p = self.instances[index]
        return {
            **{name: environ.get(name) for name in p.kept_out},
            **(dict(p.env) if self.compact else {}),
            **dict(p.user_env),
        }


def make_plan(
    config: LaunchConfig,
    *,
    hosts: tuple[Host, ...],
    machines: tuple[Machine | None, ...],
    mpi: Mpi,
    environ: Mapping[str, str],
    env_file_text: str | None = None,
    reached: Reach | None = None,
    enforce: bool = True,
) -> LaunchPlan:
    """Plan the launch of ``config`` on ``hosts``.

    Args:
        config: what is asked for.
        hosts: where instances may run.
        machines: one for each host; None where nothing is known, then nothing is bound there.
        mpi: the MPI whose command is made.
        environ: the launcher's environment.
        env_file_text: content of ``--env-file``.
        reached: how other hosts are reached; None when there are none.
        enforce: refuse what does not fit the machines; else the plan keeps the ``refusal``.

    Raises:
        UsageError: what is asked for does not fit the hosts or machines.
    """
    topology = make_topology(config, hosts)
    hosts, machines = topology.hosts, machines[: len(topology.hosts)]
    placements, refusal = place_instances(config, topology, machines)
    if refusal and enforce:
        raise UsageError(refusal)
    user_env = user_variables(config.env, env_file_text, environ)
    spans_hosts = not all(host.is_local for host in hosts)
    instances, contexts = _instances(
        config,
        topology,
        placements,
        user_env,
        environ,
        common_variables(config, topology, environ, reached, mpi.library),
    )
    request = MpiRequest(
        contexts=contexts,
        hosts=(tuple((h.name, topology.instances_per_host) for h in hosts) if spans_hosts else ()),
        global_args=tuple(
            word
            for text in config.mpi_global_args
            for word in split_args(text, "--mpi-global-args")
        ),
        agent=reached.shell.words if reached is not None else (),
        network=reached.network if reached is not None else "",
        network_is_ours=reached is None or reached.shares_network,
        is_launched_inside=any(host.is_local for host in hosts),
        ignores_slurm=not spans_hosts and "SLURM_JOBID" in environ,
        ignores_host_file=not spans_hosts and any(n in environ for n in DEFAULT_HOST_FILES),
        allow_run_as_root=config.allow_run_as_root,
        fast_start=config.mpi_fast_start
        and (not spans_hosts or (reached is not None and not reached.has_fabric)),
        grace_seconds=config.grace,
    )
    command = make_command(mpi, request)
    compact = is_too_long(command)
    return LaunchPlan(
        config=config,
        topology=topology,
        machines=machines,
        instances=instances,
        command=make_command(mpi, collapsed(request)) if compact else command,
        compact=compact,
        user_threads=user_threads(dict(user_env), environ),
        network=request.network,
        refusal=refusal,
        hostnames=reached.hostnames if reached is not None else {},
    )


def _instances(
    config: LaunchConfig,
    topology: Topology,
    placements: Sequence[Placement],
    user_env: Pairs,
    environ: Mapping[str, str],
    common: Pairs,
) -> tuple[tuple[InstancePlan, ...], tuple[Context, ...]]:
    """Give every instance its variables, and its part of the command.

    What the user's own -x arguments set is left to them: Open MPI takes the first value of a name.
    """
    shared = tuple(
        word for text in config.mpi_local_args for word in split_args(text, "--mpi-local-args")
    )
    own = instance_local_args(config)
    by_everyone = set_by(shared, environ)
    by_user = {i: by_everyone | set_by(args, environ) for i, args in own.items()}
    by_any_user = by_everyone.union(*by_user.values())
    threads_by_user = {name for name in THREAD_VARIABLES if name in environ}
    bound = placement_variables(placements, {name for name, _ in user_env} | threads_by_user)
    target = ("POPLAR_TARGET_OPTIONS", target_options(topology, environ))
    spans_hosts = not all(host.is_local for host in topology.hosts)
    by_name = [
        name
        for name in (*_FORWARDED, *sorted(threads_by_user), *(_TO_REMOTE if spans_hosts else ()))
        if name in environ or name in _TO_REMOTE
    ]
    program = (sys.executable, "-I", "-S", _WRAPPER, "--", *map(shield, config.program))
    instances, contexts = [], []
    for instance, placement, binding in zip(topology.instances, placements, bound, strict=True):
        theirs = by_user.get(instance.index, by_everyone)
        env = tuple(
            pair
            for pair in (
                *wire_variables(config, topology, instance),
                *common,
                *torchrun_variables(topology, instance),
                *binding,
            )
            if pair[0] not in theirs
        )
        last = () if target[0] in theirs else (target,)
        ours = {name for name, _ in env}
        instances.append(
            InstancePlan(
                instance=instance,
                placement=placement,
                env=(*env, *last),
                user_env=user_env,
                kept_out=tuple(sorted(by_any_user - theirs - ours - {target[0]})),
            )
        )
        contexts.append(
            Context(
                variables=env,
                forwarded=tuple(name for name in by_name if name not in theirs),
                local_args=(*shared, *own.get(instance.index, ())),
                last_variables=last,
                command=program,
            )
        )
    return tuple(instances), tuple(contexts)


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
