"""Functions that make pods like Graphcore's systems POD4 to POD256, or like a single machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from popdist_py.device_numbers import IPUS_PER_MACHINE, LINK_DOMAIN_IPUS
from popdist_py.errors import counted
from popdist_py.pods.model.partition_rules import is_power_of_two
from popdist_py.pods.model.pod_errors import InvalidRequestError
from popdist_py.pods.model.pod_parts import (
    Agent,
    Allocation,
    Cluster,
    Pod,
)
from popdist_py.pods.model.pod_rules import check_pod

# The number of IPU-Machines and the number of IPU-Link domains in each system.
SYSTEMS: dict[str, tuple[int, int]] = {
    "POD4": (1, 1),
    "POD16": (4, 1),
    "POD64": (16, 1),
    "POD128": (32, 2),
    "POD256": (64, 4),
}
# The number of IPUs that gc-info lists on a machine without a configured pod.
MACHINE_IPUS = 16


def system_pod(system: str, name: str, hosts: Sequence[str] | None = None) -> Pod:
    """Return a pod like a Graphcore system, with one allocation that contains all IPU-Machines.

    In systems with 64 or more IPUs, the IPU-Links form a torus and the GW-Links form a ring. In
    smaller systems, the IPU-Links form a mesh.

    Args:
        system: A key of SYSTEMS, in upper or lower case.
        name: The name of the new pod.
        hosts: The names of the hosts; None for this host. All hosts get the same number of
            IPU-Machines.

    Raises:
        InvalidRequestError: The system is unknown, a host is repeated, or the IPU-Machines cannot
            be divided equally among the hosts.
    """
    if system.upper() not in SYSTEMS:
        raise InvalidRequestError(
            f"unknown Graphcore system {system!r}: expected one of {', '.join(SYSTEMS)}"
        )
    machines, num_ilds = SYSTEMS[system.upper()]
    return _uniform_pod(name, [IPUS_PER_MACHINE] * machines, num_ilds, hosts)


def machine_pod(name: str, num_ipus: int = MACHINE_IPUS) -> Pod:
    """Return a pod with one IPU-Link domain, whose IPU-Machines all belong to this host.

    The pod does not depend on the NUMA nodes of the host, because a host reaches its IPU-Machines
    over the network.

    Raises:
        InvalidRequestError: ``num_ipus`` is not a power of two up to 64.
    """
    if not is_power_of_two(num_ipus) or num_ipus > LINK_DOMAIN_IPUS:
        raise InvalidRequestError(
            f"a machine cannot have {num_ipus} IPUs: expected 1, 2, 4, 8, ... or {LINK_DOMAIN_IPUS}"
        )
    each = min(num_ipus, IPUS_PER_MACHINE)
    return _uniform_pod(name, [each] * (num_ipus // each), 1, None)


def _uniform_pod(
    name: str, machines: Sequence[int], num_ilds: int, hosts: Sequence[str] | None
) -> Pod:
    given = tuple(hosts or (os.uname().nodename or "localhost",))
    if len(given) > len(machines) or len(machines) % len(given) or len(set(given)) < len(given):
        raise InvalidRequestError(
            f"{counted(len(machines), 'IPU-Machine')} cannot be divided equally among the "
            f"{counted(len(given), 'host')} {', '.join(given)}: name each host once, and a number "
            f"of hosts that divides {len(machines)}"
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
