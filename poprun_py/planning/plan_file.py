"""Launch plans as JSON, for --export-plan and --from-plan.

A user may have edited a saved plan, so every value of the plan is checked when the plan is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import counted
from poprun_py.errors import UsageError, shortened
from poprun_py.machines.host_list import Host, are_host_names
from poprun_py.machines.machine import Machine
from poprun_py.options.config_files import checked_values
from poprun_py.options.launch_config import LaunchConfig, config_to_dict, merged_config
from poprun_py.options.option_types import is_word
from poprun_py.planning.cpu_placement import Placement, place_instances
from poprun_py.planning.instance_variables import check_variable
from poprun_py.planning.instances_on_hosts import Instance, Topology, make_topology
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan, user_thread_counts
from poprun_py.planning.mpi_commands import (
    escape_colon,
    split_command,
    split_mpi_arguments,
)
from poprun_py.planning.user_program import absolute_program

PLAN_VERSION = 2
# The versions of plan files that the launcher reads. A plan file of version 1 does not contain the
# working folder of the job, so the job runs in the working folder of the launcher.
_READABLE = (1, PLAN_VERSION)
# The keys under which a saved plan stores the numbers of replicas, instances and IPUs.
_NUMBERS = ("num_replicas", "num_instances", "num_local_replicas", "ipus_per_replica", "num_ilds")
_MAX_NUMBER = 1 << 31
# The maximum number of variables that an error message about unset variables names.
_MOST_NAMED = 8


def portable(plan: LaunchPlan) -> LaunchPlan:
    """Return ``plan`` with an absolute program path, for launches in any folder."""
    config = plan.config
    program = absolute_program(
        config.program, plan.folder, plan.environ, is_local=not plan.spans_hosts
    )
    old, new = (tuple(map(escape_colon, words)) for words in (config.program, program))
    words: list[str] = []
    for part in split_command(plan.command):
        assert part[len(part) - len(old) :] == old
        words += [*([":"] if words else []), *part[: len(part) - len(old)], *new]
    return replace(plan, config=replace(config, program=program), command=tuple(words))


def plan_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return ``plan`` as JSON values, with null as the value of each variable of the user.

    The values of --env and --env-file may be secret, so they are not saved. A launch of the saved
    plan reads the values of --env from the environment. The decision about the IPU partition is
    saved only as information, because a launch of the saved plan decides again.
    """
    topology, partition = plan.topology, plan.partition
    data = {
        "version": PLAN_VERSION,
        **{key: getattr(topology, key) for key in _NUMBERS},
        "hosts": [
            {
                "name": host.name,
                "slots": topology.instances_per_host,
                "numa_nodes": [
                    {
                        "index": node.index,
                        "cpus": sorted(node.cpus),
                        "memory_bytes": node.memory_bytes,
                    }
                    for node in (machine.numa_nodes if machine is not None else ())
                ],
                **({"user": host.user} if host.user else {}),
                **({"hostname": plan.hostnames[host.name]} if host.name in plan.hostnames else {}),
            }
            for host, machine in zip(topology.hosts, plan.machines, strict=True)
        ],
        "instances": [_instance_to_json(each, topology) for each in plan.instances],
        "command": list(plan.command),
        "machines": [m.to_json() if m is not None else None for m in plan.machines],
        "local": not plan.spans_hosts,
        "network": plan.network,
        "compact": plan.compact,
        "folder": plan.folder,
    }
    if partition is not None:
        data["partition"] = {
            "action": str(partition.action),
            "pod": partition.where,
            "name": partition.name,
            "num_ilds": partition.num_ilds,
        }
    options = config_to_dict(plan.config)
    for name in ("program", "env", "env_file"):
        options.pop(name, None)
    return {**data, "program": list(plan.config.program), "options": options}


def _instance_to_json(planned: InstancePlan, topology: Topology) -> dict[str, Any]:
    instance, placement = planned.instance, planned.placement
    return {
        "index": instance.index,
        "local_index": instance.local_index,
        "host": topology.hosts[instance.host_index].name,
        "ild": instance.ild,
        "replicas": list(instance.replicas),
        "ipus": list(instance.ipus),
        "numa_nodes": list(placement.numa_nodes),
        "memory_nodes": list(placement.memory_nodes),
        "cpus": list(placement.cpus),
        "threads": placement.threads,
        "env": dict(planned.env),
        "kept_out": list(planned.unset),
        "user_env": dict.fromkeys(name for name, _ in planned.user_env),
    }


def topology_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return the topology of ``plan`` as JSON values, without variables, command and options."""
    data = plan_to_json(plan)
    for key in ("command", "compact", "local", "machines", "program", "options"):
        del data[key]
    for instance in data["instances"]:
        del instance["env"], instance["user_env"], instance["kept_out"]
    return data


def plan_from_json(data: Any, environ: Mapping[str, str]) -> LaunchPlan:
    """Return the plan that ``plan_to_json`` made, with the values of --env from ``environ``.

    If ``environ`` does not contain all variables of --env, the plan can be shown but not launched.
    If an earlier version of the launcher saved the plan, ``data`` may contain values of --env.

    Raises:
        UsageError: ``data`` is not a plan of a known version, or contains contradictory values.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise UsageError(
            "the file is not a launch plan: expected the JSON that --export-plan writes"
        )
    if data["version"] not in _READABLE:
        raise UsageError(
            f"the launch plan has version {data['version']!r}; expected version {PLAN_VERSION}; "
            "export the plan again with this poprun-py"
        )
    try:
        return _plan_from_json(data, environ)
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        detail = (
            f"the key {error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        )
        raise UsageError(
            f"the launch plan is damaged ({detail}): expected the JSON that --export-plan writes"
        ) from None


def _plan_from_json(data: dict[str, Any], environ: Mapping[str, str]) -> LaunchPlan:
    program = _texts(data["program"], "program")
    options = checked_values(data["options"], "launch plan: options")
    config = replace(merged_config(options), program=program)
    hosts = _hosts(data)
    topology = make_topology(config, hosts, num_ilds=_num_ilds(config, data["num_ilds"]))
    _check_topology(data, topology)
    instances = tuple(
        _instance_from_json(entry, instance, environ)
        for entry, instance in zip(data["instances"], topology.instances, strict=True)
    )
    machines = tuple(
        Machine.from_json(machine) if machine is not None else None
        for _, machine in zip(hosts, data["machines"], strict=True)
    )
    folder = "" if data["version"] == 1 else _text(data["folder"], "folder")
    if folder and not folder.startswith("/"):
        raise _unexpected("folder", folder, "an absolute path")
    # The launcher checks again whether the job fits the machines, so that a user cannot launch a
    # refused plan after editing the plan file.
    _, refusal = place_instances(config, topology, machines)
    plan = LaunchPlan(
        config=config,
        topology=topology,
        machines=machines,
        instances=instances,
        command=_texts(data["command"], "command"),
        environ=dict(environ),
        compact=data["compact"] is True,
        hostnames={
            h["name"]: _text(h["hostname"], "hostname") for h in data["hosts"] if "hostname" in h
        },
        user_threads=user_thread_counts(
            split_mpi_arguments(config)[1].of_every_instance,
            instances[0].user_env,
            # Variables in the plan file take precedence over the launcher's environment.
            {**environ, **dict(instances[0].env)},
        ),
        network=_text(data["network"], "network"),
        folder=folder,
        refusal=refusal or _unset_variables(data["instances"], environ),
    )
    _check_command(plan)
    return plan


def _hosts(data: dict[str, Any]) -> tuple[Host, ...]:
    entries, local = data["hosts"], data["local"]
    if not isinstance(entries, list) or not entries:
        raise _unexpected("hosts", entries, "a list of hosts")
    if type(local) is not bool:
        raise _unexpected("local", local, "true or false")
    names = [_text(entry["name"], "host name") for entry in entries]
    if not are_host_names(names):
        raise _unexpected("host names", names, "different names without blanks")
    users = [_text(entry.get("user", ""), "user") for entry in entries]
    return tuple(
        Host(name=name, user=user, is_local=local) for name, user in zip(names, users, strict=True)
    )


def _check_topology(data: dict[str, Any], topology: Topology) -> None:
    """Raise UsageError if a saved number, such as that of replicas, contradicts the options."""
    for key in _NUMBERS:
        if data[key] != getattr(topology, key):
            raise UsageError(
                f"launch plan: {key} is {data[key]!r}, but the options of the plan say "
                f"{getattr(topology, key)}; export the plan again"
            )
    if len(data["instances"]) != topology.num_instances:
        raise UsageError(
            f"launch plan: the plan lists {counted(len(data['instances']), 'instance')}, but the "
            f"options of the plan say {counted(topology.num_instances, 'instance')}; export the "
            "plan again"
        )


def _unset_variables(instances: list[Any], environ: Mapping[str, str]) -> str:
    """Return an error text about variables of --env that have no value; empty if all have one."""
    unset = (
        name
        for entry in instances
        for name, value in entry.get("user_env", {}).items()
        if value is None and name not in environ
    )
    names = list(dict.fromkeys(unset))
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        "a saved plan does not contain the values of --env and --env-file; set "
        f"{', '.join(names[:_MOST_NAMED])}{more} in the environment of this launch"
    )


def _num_ilds(config: LaunchConfig, saved: Any) -> int | None:
    """Return ``saved``, the number of IPU-Link domains in a saved plan, if the number is possible.

    If the options give the number of IPU-Link domains, or if the job cannot be divided among
    ``saved`` IPU-Link domains, return None.
    """
    if config.num_ilds is not None or type(saved) is not int:
        return None
    num_ipus = config.num_replicas * config.ipus_per_replica
    is_possible = (
        0 < saved <= config.num_instances
        and config.num_instances % saved == 0
        and num_ipus <= saved * LINK_DOMAIN_IPUS
    )
    return saved if is_possible else None


def _check_command(plan: LaunchPlan) -> None:
    """Raise UsageError if the mpirun command has another program, variable or CPU than the plan."""
    parts = split_command(plan.command)
    program = tuple(escape_colon(word) for word in plan.config.program)
    if len(parts) != (1 if plan.compact else len(plan.instances)):
        raise _contradiction("instances")
    for part in parts:
        if part[-len(program) :] != program:
            raise _contradiction("program")
    for index, instance in enumerate(plan.instances):
        cpus = dict(instance.env).get("POPRUN_CPUS", "")
        if instance.placement.cpus != _numbers([int(cpu) for cpu in cpus.split(",") if cpu]):
            raise UsageError(
                f"launch plan: cpus and POPRUN_CPUS of instance {index} differ; set both to the "
                "same CPUs, or make a new plan"
            )
        if plan.compact:
            continue
        words = frozenset(parts[index])
        for name, value in instance.env:
            # An Open MPI command contains NAME=VALUE as one word. An MPICH command contains NAME
            # and VALUE as two words.
            if f"{name}={value}" not in words and not words.issuperset((name, value)):
                raise _contradiction(f"{name} of instance {index}")


def _contradiction(what: str) -> UsageError:
    return UsageError(
        f"launch plan: {what} of the plan and of its mpirun command differ, and the mpirun command "
        "is used; change both, or make a new plan"
    )


def _unexpected(what: str, value: Any, expected: str) -> UsageError:
    return UsageError(
        f"launch plan: the value of {what} is {shortened(repr(value))}; expected {expected}"
    )


def _instance_from_json(
    entry: dict[str, Any], instance: Instance, environ: Mapping[str, str]
) -> InstancePlan:
    user_env = []
    for name, value in entry.get("user_env", {}).items():
        value = environ.get(name, "") if value is None else value
        check_variable("launch plan: user_env", name, value)
        user_env.append((name, value))
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
        unset=tuple(_text(name, "variable") for name in entry.get("kept_out", ())),
    )


def _text(value: Any, what: str) -> str:
    if not is_word(value):
        raise _unexpected(what, value, "a text")
    return value


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise _unexpected(what, values, "a list of strings")
    return tuple(_text(value, what) for value in values)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(v) is int and 0 <= v < _MAX_NUMBER for v in values
    ):
        raise _unexpected("a number or list", values, "whole numbers below 2**31")
    return tuple(values)
