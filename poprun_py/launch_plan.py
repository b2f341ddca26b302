"""LaunchPlan: everything that a launch will do, as a value that can be printed, saved and run.

Made by pure functions of the configuration, the hosts, their machines and the environment; read
from and written to JSON. Nothing is started here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poprun_py.config import LaunchConfig
from poprun_py.errors import UsageError
from poprun_py.hardware import Machine
from poprun_py.hosts import Host
from poprun_py.instance_variables import (
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
from poprun_py.mpi import (
    Context,
    Mpi,
    MpiRequest,
    collapsed,
    is_too_long,
    make_command,
    shield,
    split_args,
)
from poprun_py.placement import Placement, PlacementPolicy, place
from poprun_py.topology import Instance, Topology, make_topology

if TYPE_CHECKING:
    from poprun_py.reach import Reach

__all__ = [
    "PLAN_VERSION",
    "InstancePlan",
    "LaunchPlan",
    "make_plan",
    "plan_from_json",
    "plan_to_json",
]

PLAN_VERSION = 1

_WRAPPER = str(Path(__file__).with_name("instance.py"))
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
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
    what hosts of a job on others call themselves, where that is known.
    """

    config: LaunchConfig
    topology: Topology
    machines: tuple[Machine | None, ...]
    instances: tuple[InstancePlan, ...]
    command: tuple[str, ...]
    compact: bool = False
    user_threads: int | None = None
    network: str = ""
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

    Raises:
        UsageError: what is asked for does not fit the hosts or machines.
    """
    topology = make_topology(config, hosts)
    hosts, machines = topology.hosts, machines[: len(topology.hosts)]
    placements = _placements(config, topology, machines)
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


def _placements(
    config: LaunchConfig, topology: Topology, machines: tuple[Machine | None, ...]
) -> list[Placement]:
    """Place every host's instances on its machine; equal machines are placed once."""
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
    for machine in machines:
        if machine is None:
            placements += unknown
            continue
        if id(machine) not in done:
            done[id(machine)] = place(machine, share, policy)
        placements += done[id(machine)]
    return placements


# --- JSON -------------------------------------------------------------------------------------


def plan_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return ``plan`` as JSON values; values of variables whose name says secret are null."""
    from poprun_py.config_file import config_to_dict

    topology = plan.topology
    return {
        "version": PLAN_VERSION,
        "num_replicas": topology.num_replicas,
        "num_instances": topology.num_instances,
        "num_local_replicas": topology.num_local_replicas,
        "ipus_per_replica": topology.ipus_per_replica,
        "num_ilds": topology.num_ilds,
        "hosts": [
            {
                "name": host.name,
                "slots": topology.instances_per_host,
                "numa_nodes": _nodes(machine),
                **({"hostname": plan.hostnames[host.name]} if host.name in plan.hostnames else {}),
            }
            for host, machine in zip(topology.hosts, plan.machines, strict=True)
        ],
        "instances": [
            {
                "index": p.instance.index,
                "local_index": p.instance.local_index,
                "host": topology.hosts[p.instance.host_index].name,
                "ild": p.instance.ild,
                "replicas": list(p.instance.replicas),
                "ipus": list(p.instance.ipus),
                "numa_nodes": list(p.placement.numa_nodes),
                "memory_nodes": list(p.placement.memory_nodes),
                "cpus": list(p.placement.cpus),
                "threads": p.placement.threads,
                "env": dict(p.env),
                "kept_out": list(p.kept_out),
                "user_env": {n: None if _SECRET.search(n) else v for n, v in p.user_env},
            }
            for p in plan.instances
        ],
        "command": list(plan.command),
        "machines": [m.to_json() if m is not None else None for m in plan.machines],
        "local": not plan.spans_hosts,
        "network": plan.network,
        "compact": plan.compact,
        "program": list(plan.config.program),
        "options": {
            k: v
            for k, v in config_to_dict(plan.config).items()
            if k not in {"program", "env", "env_file"}
        },
    }


def _nodes(machine: Machine | None) -> list[dict[str, Any]]:
    if machine is None:
        return []
    return [
        {"index": node.index, "cpus": sorted(node.cpus), "memory_bytes": node.memory_bytes}
        for node in machine.numa_nodes
    ]


def plan_from_json(data: Any, environ: Mapping[str, str]) -> LaunchPlan:
    """Return the plan that ``plan_to_json`` wrote; secrets come from ``environ``.

    Raises:
        UsageError: it is no plan, of another version, or contradicts itself.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise UsageError("not a launch plan: expected the JSON written by --export-plan")
    if data["version"] != PLAN_VERSION:
        raise UsageError(
            f"launch plan of version {data['version']!r}: expected version {PLAN_VERSION}; export "
            "it again with this poprun-py"
        )
    try:
        return _plan_from_json(data, environ)
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"damaged launch plan ({detail}): expected the JSON written by --export-plan"
        ) from None


def _plan_from_json(data: dict[str, Any], environ: Mapping[str, str]) -> LaunchPlan:
    program = _texts(data["program"], "program")
    from poprun_py.config_file import config_from_dict

    config = replace(config_from_dict(data["options"]), program=program)
    local = data["local"]
    if not isinstance(data["hosts"], list) or not data["hosts"]:
        raise UsageError(f"launch plan: hosts is {data['hosts']!r}; expected a list of hosts")
    hosts = tuple(
        Host(name=_text(h["name"], "host name"), slots=None, is_local=bool(local))
        for h in data["hosts"]
    )
    topology = make_topology(config, hosts)
    for key in (
        "num_replicas",
        "num_instances",
        "num_local_replicas",
        "ipus_per_replica",
        "num_ilds",
    ):
        if data[key] != getattr(topology, key):
            raise UsageError(
                f"launch plan says {key} {data[key]!r}, its options say {getattr(topology, key)}"
            )
    if len(data["instances"]) != topology.num_instances:
        raise UsageError(
            f"launch plan lists {len(data['instances'])} instances, its options say "
            f"{topology.num_instances}"
        )
    return LaunchPlan(
        config=config,
        topology=topology,
        machines=tuple(
            Machine.from_json(machine) if machine is not None else None
            for _, machine in zip(hosts, data["machines"], strict=True)
        ),
        instances=tuple(
            _instance_from_json(entry, instance, environ)
            for entry, instance in zip(data["instances"], topology.instances, strict=True)
        ),
        command=_texts(data["command"], "command"),
        compact=data["compact"] is True,
        hostnames={
            h["name"]: _text(h["hostname"], "hostname") for h in data["hosts"] if "hostname" in h
        },
    )


def _instance_from_json(
    entry: dict[str, Any], instance: Instance, environ: Mapping[str, str]
) -> InstancePlan:
    user_env = []
    for name, value in entry.get("user_env", {}).items():
        if value is None and name not in environ:
            raise UsageError(f"{name} is not kept in a saved plan: set it in the environment")
        user_env.append(
            (_text(name, "variable"), environ[name] if value is None else _text(value, name))
        )
    return InstancePlan(
        instance=instance,
        placement=Placement(
            numa_nodes=_numbers(entry["numa_nodes"]),
            memory_nodes=_numbers(entry["memory_nodes"]),
            cpus=_numbers(entry["cpus"]),
            threads=_numbers([entry["threads"]])[0],
        ),
        env=tuple((_text(n, "variable"), _text(v, n)) for n, v in entry["env"].items()),
        user_env=tuple(user_env),
        kept_out=tuple(_text(name, "variable") for name in entry.get("kept_out", ())),
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"launch plan: {what} is {value!r}; expected a text")
    return value


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise UsageError(f"launch plan: {what} is {values!r}; expected a list of texts")
    return tuple(_text(value, what) for value in values)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise UsageError(f"launch plan: {values!r}; expected a list of whole numbers")
    return tuple(values)
