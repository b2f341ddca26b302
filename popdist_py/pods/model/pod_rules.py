"""Checks of the agents, clusters and allocations of a pod."""

from __future__ import annotations

from dataclasses import replace

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import counted
from popdist_py.pods.model.partition_rules import check_name, is_power_of_two
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    NameTakenError,
    check_known,
)
from popdist_py.pods.model.pod_parts import Allocation, Cluster, Pod

_TOPOLOGIES = ("mesh", "torus")
_MOST_SECONDS = 3600.0


def check_pod(pod: Pod) -> None:
    """Check the agents, clusters and allocations of a pod.

    Raises:
        PodError: A part of the pod breaks a rule.
    """
    check_name("pod", pod.name)
    for what, seconds in (("create", pod.create_seconds), ("reset", pod.reset_seconds)):
        if not 0 <= seconds <= _MOST_SECONDS:
            raise InvalidRequestError(
                f"{what}_seconds of pod {pod.name} is {seconds:g}: expected 0 to {_MOST_SECONDS:g} "
                "seconds"
            )
    if not pod.agents:
        raise InvalidRequestError(f"pod {pod.name} has no agents: add at least one agent")
    names: set[str] = set()
    for agent in pod.agents:
        check_name("agent", agent.name)
        if agent.name in names:
            raise NameTakenError(
                f"two agents have the name {agent.name}: give each agent its own name"
            )
        names.add(agent.name)
        # A host is a name, or an IPv4 or IPv6 address.
        if not agent.host or not agent.host.isprintable() or " " in agent.host:
            raise InvalidRequestError(
                f"agent {agent.name} has the invalid host {agent.host!r}: expected a host name or "
                "an IP address"
            )
        if not is_power_of_two(agent.num_ipus) or agent.num_ipus > LINK_DOMAIN_IPUS:
            raise InvalidRequestError(
                f"agent {agent.name} has {counted(agent.num_ipus, 'IPU')}: expected 1, 2, 4, 8, "
                f"... or {LINK_DOMAIN_IPUS}"
            )
    growing = replace(pod, clusters=(), allocations=())
    for cluster in pod.clusters:
        check_cluster(growing, cluster)
        growing = replace(growing, clusters=(*growing.clusters, cluster))
    for allocation in pod.allocations:
        check_allocation(growing, allocation)
        growing = replace(growing, allocations=(*growing.allocations, allocation))


def check_cluster(pod: Pod, cluster: Cluster) -> None:
    """Check a new cluster. Its agents must form IPU-Link domains of equal size.

    Raises:
        InvalidRequestError: The cluster breaks a rule.
        NameTakenError: Another cluster has this name.
        UnknownNameError: An agent does not exist in the pod.
        InUseError: An agent belongs to another cluster.
    """
    check_name("cluster", cluster.name)
    if cluster.name in {each.name for each in pod.clusters}:
        raise NameTakenError(f"a cluster named {cluster.name} already exists: choose another name")
    _check_agents("cluster", cluster.name, cluster.agents)
    agents = {agent.name: agent for agent in pod.agents}
    owners = {agent: each.name for each in pod.clusters for agent in each.agents}
    for agent in cluster.agents:
        check_known("agent", agent, agents, f"in pod {pod.name}")
        if agent in owners:
            raise InUseError(
                f"agent {agent} already belongs to cluster {owners[agent]}: choose another agent, "
                "or remove that cluster first"
            )
    if cluster.topology not in _TOPOLOGIES:
        raise InvalidRequestError(
            f"cluster {cluster.name} has the unknown topology {cluster.topology!r}: expected "
            f"{' or '.join(_TOPOLOGIES)}"
        )
    ilds = cluster.num_ilds
    if ilds < 1 or len(cluster.agents) % ilds:
        raise InvalidRequestError(
            f"the {counted(len(cluster.agents), 'agent')} of cluster {cluster.name} cannot be "
            f"divided into {counted(ilds, 'equal IPU-Link domain')}: give a number of domains that "
            f"divides {len(cluster.agents)}"
        )
    each = len(cluster.agents) // ilds
    sizes = [
        sum(agents[name].num_ipus for name in cluster.agents[start : start + each])
        for start in range(0, len(cluster.agents), each)
    ]
    if len(set(sizes)) > 1:
        raise InvalidRequestError(
            f"the IPU-Link domains of cluster {cluster.name} have {', '.join(map(str, sizes))} "
            "IPUs: all domains of a cluster must have the same number of IPUs"
        )
    if sizes[0] > LINK_DOMAIN_IPUS:
        raise InvalidRequestError(
            f"cluster {cluster.name} has {sizes[0]} IPUs in each IPU-Link domain, but a domain has "
            f"at most {LINK_DOMAIN_IPUS} IPUs: give the cluster "
            f"{ilds * -(-sizes[0] // LINK_DOMAIN_IPUS)} or more domains"
        )


def check_allocation(pod: Pod, allocation: Allocation) -> None:
    """Check a new allocation. All its agents must belong to the same cluster.

    An agent may belong to several allocations.

    Raises:
        InvalidRequestError: The allocation breaks a rule.
        NameTakenError: Another allocation has this name.
        UnknownNameError: The cluster does not exist, or an agent does not belong to the cluster.
    """
    check_name("allocation", allocation.name)
    if allocation.name in {each.name for each in pod.allocations}:
        raise NameTakenError(
            f"an allocation named {allocation.name} already exists: choose another name"
        )
    clusters = {each.name: each for each in pod.clusters}
    check_known("cluster", allocation.cluster, clusters, f"in pod {pod.name}")
    _check_agents("allocation", allocation.name, allocation.agents)
    for agent in allocation.agents:
        check_known(
            "agent", agent, clusters[allocation.cluster].agents, f"in cluster {allocation.cluster}"
        )


def _check_agents(what: str, name: str, agents: tuple[str, ...]) -> None:
    if not agents:
        raise InvalidRequestError(f"{what} {name} has no agents: give at least one agent")
    if len(set(agents)) != len(agents):
        raise InvalidRequestError(f"{what} {name} lists an agent twice: list each agent once")
