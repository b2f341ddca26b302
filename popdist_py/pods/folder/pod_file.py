"""The file ``pod.toml``, which describes a pod, and the descriptions of Graphcore's systems."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from popdist_py.errors import counted
from popdist_py.pods.model.partition_rules import is_power_of_two
from popdist_py.pods.model.pod_errors import DamagedError, InvalidRequestError, PodError
from popdist_py.pods.model.pod_parts import (
    IPUS_PER_MACHINE,
    LINK_DOMAIN_IPUS,
    Agent,
    Allocation,
    Cluster,
    Pod,
)
from popdist_py.pods.model.pod_rules import check_pod
from popdist_py.pods.server.pod_api import from_json

__all__ = [
    "MACHINE_IPUS",
    "POD_FILE",
    "SYSTEMS",
    "format_pod",
    "machine_pod",
    "parse_pod",
    "pod_of",
    "read_pod",
    "system_pod",
]

POD_FILE = "pod.toml"
# IPU-Machines and IPU-Link domains of each system.
SYSTEMS: dict[str, tuple[int, int]] = {
    "POD4": (1, 1),
    "POD16": (4, 1),
    "POD64": (16, 1),
    "POD128": (32, 2),
    "POD256": (64, 4),
}
# The number of IPUs that gc-info shows for a machine without a pod.
MACHINE_IPUS = 16


def system_pod(system: str, name: str, hosts: Sequence[str] | None = None) -> Pod:
    """Return a pod like a Graphcore system, with one allocation of all its IPU-Machines.

    Racks of 64 IPUs are a torus, and their GW-Links a ring; smaller systems are a mesh.

    Args:
        system: A key of SYSTEMS, in any case.
        name: The name of the new pod.
        hosts: The hosts of the IPU-Machines, in equal parts; by default this host.

    Raises:
        InvalidRequestError: The system is unknown, or the hosts are too many or repeated.
    """
    if system.upper() not in SYSTEMS:
        raise InvalidRequestError(f"{system!r} is no system: give {', '.join(SYSTEMS)}")
    machines, num_ilds = SYSTEMS[system.upper()]
    return _uniform_pod(name, [IPUS_PER_MACHINE] * machines, num_ilds, hosts)


def machine_pod(name: str, num_ipus: int = MACHINE_IPUS) -> Pod:
    """Return a pod of this host's IPUs: IPU-Machines of 4 in one IPU-Link domain, as a POD16.

    NUMA nodes do not matter, because an IPU-Machine is attached by the network of its host.

    Raises:
        InvalidRequestError: ``num_ipus`` is not a power of two up to 64.
    """
    if not is_power_of_two(num_ipus) or num_ipus > LINK_DOMAIN_IPUS:
        raise InvalidRequestError(
            f"a machine has no {num_ipus} IPUs: give 1, 2, 4, 8, ... or {LINK_DOMAIN_IPUS}"
        )
    each = min(num_ipus, IPUS_PER_MACHINE)
    return _uniform_pod(name, [each] * (num_ipus // each), 1, None)


def _uniform_pod(
    name: str, machines: Sequence[int], num_ilds: int, hosts: Sequence[str] | None
) -> Pod:
    given = tuple(hosts or (os.uname().nodename or "localhost",))
    if len(given) > len(machines) or len(machines) % len(given) or len(set(given)) < len(given):
        raise InvalidRequestError(
            f"{counted(len(given), 'host')} cannot share "
            f"{counted(len(machines), 'IPU-Machine')} equally: give hosts "
            "once each, and as many as divide the IPU-Machines"
        )
    width = max(2, len(str(len(machines))))
    agents = tuple(
        Agent(
            name=f"ag{i + 1:0{width}}",
            host=given[i * len(given) // len(machines)],
            num_ipus=num_ipus,
        )
        for i, num_ipus in enumerate(machines)
    )
    names = tuple(agent.name for agent in agents)
    total = sum(machines)
    whole_rack = total >= LINK_DOMAIN_IPUS
    cluster = Cluster(
        name=f"c{total}",
        agents=names,
        num_ilds=num_ilds,
        topology="torus" if whole_rack else "mesh",
        is_looped=whole_rack,
    )
    allocation = Allocation(name=f"a{total}", cluster=cluster.name, agents=names)
    pod = Pod(name=name, agents=agents, clusters=(cluster,), allocations=(allocation,))
    check_pod(pod)
    return pod


def format_pod(pod: Pod) -> str:
    """Return the text of ``pod.toml``."""
    lines = [
        "# A pod of emulated IPUs; agents are IPU-Machines. What is changed here counts as soon as",
        "# the pod has no partitions; the seconds that a partition stays PENDING count at once.",
        *_entries(pod, ("name", "create_seconds", "reset_seconds")),
    ]
    for table, parts in (
        ("agents", pod.agents),
        ("clusters", pod.clusters),
        ("allocations", pod.allocations),
    ):
        for part in parts:
            lines += ["", f"[[{table}]]", *_entries(part, [f.name for f in fields(part)])]
    return "\n".join(lines) + "\n"


def _entries(value: Any, names: Sequence[str]) -> list[str]:
    return [f"{name} = {_toml(getattr(value, name))}" for name in names]


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # Strings, numbers and booleans are written alike in JSON and TOML for the checked names.
    return json.dumps(value, ensure_ascii=False)


def read_pod(file: Path) -> Pod:
    """Read a ``pod.toml``.

    Raises:
        DamagedError: The file is not a pod description; the message names the place.
        PodError: The file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DamagedError(f"{file} is no text in UTF-8") from None
    except OSError as error:
        raise PodError(f"{file} cannot be read: {error.strerror}") from None
    return parse_pod(text, str(file))


def parse_pod(text: str, source: str) -> Pod:
    """Read the text of ``pod.toml``; ``source`` is its name in messages.

    Raises:
        DamagedError: The text is not TOML, or does not describe a pod.
    """
    # Imported here, because a launch without a pod does not need it.
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DamagedError(f"{source} is not TOML: {error}") from None
    return pod_of(document, source)


def pod_of(document: dict[str, Any], source: str) -> Pod:
    """Return the pod for a parsed description (DamagedError as in ``parse_pod``)."""
    tables: dict[str, Any] = {"agents": [], "clusters": [], "allocations": []}
    try:
        pod: Pod = from_json(Pod, {**tables, **document}, "pod")
        check_pod(pod)
    except PodError as error:
        raise DamagedError(f"{source}: {error}") from None
    return pod
