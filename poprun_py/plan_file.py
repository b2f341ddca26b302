"""A launch plan as JSON, and back: what --export-plan writes and --from-plan reads.

Pure: no file is opened here. A plan is read as what anybody may have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poprun_py.errors import UsageError
from poprun_py.hardware import Machine
from poprun_py.hosts import Host
from poprun_py.launch_plan import InstancePlan, LaunchPlan
from poprun_py.placement import Placement
from poprun_py.topology import Instance, make_topology

__all__ = ["PLAN_VERSION", "plan_from_json", "plan_to_json"]

PLAN_VERSION = 1
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)


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
