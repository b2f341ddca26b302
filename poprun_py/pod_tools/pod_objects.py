"""A pod and its parts as tables and facts. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from popdist_py.errors import counted
from popdist_py.pods.values import Agent, Attachment, Cluster, Ipu, Partition, Pod
from poprun_py.pod_tools.command_grammar import sync_name
from poprun_py.pod_tools.routing import gw_routing, ild_routing
from poprun_py.pod_tools.tables import facts, table
from poprun_py.texts import date_text

_NOTHING = "-"
_FREE = "free"


def partition_table(pod: Pod, partitions: Iterable[Partition]) -> str:
    """Return the table of ``list partitions``, as V-IPU's users know it."""
    clusters = {cluster.name: cluster for cluster in pod.clusters}
    return table(
        ("Partition", "Cluster", "ILDs", "GW Routing", "ILD Routing", "Size", "GCDs", "State"),
        (
            (
                *(each.name, each.cluster, each.num_ilds),
                *(gw_routing(each, clusters), ild_routing(each, clusters)),
                *(each.size, each.num_gcds, each.state.value),
            )
            for each in partitions
        ),
    )


def partition_facts(pod: Pod, partition: Partition, attachments: Sequence[Attachment]) -> str:
    """Return what ``get partition`` shows: facts, and a table of its IPUs with their holders."""
    clusters = {cluster.name: cluster for cluster in pod.clusters}
    known = {
        "size": partition.size,
        "state": partition.state.value,
        "operation": partition.operation.value,
        **({"error": partition.error} if partition.error else {}),
        "cluster": partition.cluster,
        "allocation": partition.allocation,
        "IPU-Link domains": partition.num_ilds,
        "GCDs": partition.num_gcds,
        "replicas": partition.num_replicas,
        "reconfigurable": "yes" if partition.reconfigurable else "no",
        "sync type": f"{sync_name(partition.sync_type)} ({partition.sync_type.value})",
        "GW routing": gw_routing(partition, clusters),
        "ILD routing": ild_routing(partition, clusters),
        "owner": partition.owner,
        "created": date_text(partition.created),
        "resets": partition.generation,
        "hosts": ", ".join(partition.hosts),
    }
    held = _by_ipu(partition.name, attachments)
    rows = (
        (
            *(number, number * partition.num_gcds // partition.size, partition.domain_of(number)),
            *(ipu.agent, ipu.host, ipu.number, *_holder(held.get(number))),
        )
        for number, ipu in enumerate(partition.ipus)
    )
    columns = ("ID", "GCD", "ILD", "Agent", "Host", "IPU#", *_HOLDER)
    return f"{facts(f'Partition {partition.name}', known)}\n\n{table(columns, rows)}"


_HOLDER = ("User", "Program", "PID", "Since")


def _by_ipu(partition: str, attachments: Iterable[Attachment]) -> dict[int, Attachment]:
    """Return who has which IPU of a partition."""
    own = (each for each in attachments if each.partition == partition)
    return {ipu: each for each in own for ipu in each.ipus}


def _holder(held: Attachment | None) -> tuple[object, ...]:
    if held is None:
        return (_NOTHING,) * len(_HOLDER)
    holder = held.holder
    pid = f"{holder.pid} on {holder.host}"
    return holder.user, holder.program, pid, date_text(held.since)


def device_table(
    pod: Pod, partitions: Sequence[Partition], attachments: Sequence[Attachment]
) -> str:
    """Return the table of ``list devices``: every IPU of the pod, free or taken, and by whom."""
    taken = {
        ipu.index: (partition, number)
        for partition in partitions
        for number, ipu in enumerate(partition.ipus)
    }
    held = {each.name: _by_ipu(each.name, attachments) for each in partitions}
    rows = []
    for ipu in pod.ipus():
        place = (ipu.index, ipu.agent, ipu.host, ipu.number, ipu.cluster, ipu.domain)
        if ipu.index in taken:
            partition, number = taken[ipu.index]
            holder = _holder(held[partition.name].get(number))
            rows.append((*place, partition.name, number, *holder))
        else:
            rows.append((*place, _FREE, _NOTHING, *_holder(None)))
    columns = ("IPU", "Agent", "Host", "IPU#", "Cluster", "ILD", "Partition", "ID", *_HOLDER)
    return f"{table(columns, rows)}\n{_summary(len(rows), len(taken), attachments)}"


def _summary(total: int, taken: int, attachments: Sequence[Attachment]) -> str:
    in_use = sum(len(each.ipus) for each in attachments)
    ipus = counted(total, "IPU")
    return f"{ipus}: {total - taken} free, {taken} in partitions, {in_use} of these in use"


def allocation_table(pod: Pod) -> str:
    """Return the table of ``list allocations``."""
    rows = ((each.name, ",".join(each.agents)) for each in pod.allocations)
    return table(("Allocation ID", "Agents"), rows)


def allocation_facts(pod: Pod, name: str, partitions: Iterable[Partition]) -> str:
    """Return what ``get allocation`` shows."""
    allocation = next(each for each in pod.allocations if each.name == name)
    own = [each for each in partitions if each.allocation == name]
    total = _num_ipus(pod, allocation.agents)
    known = {
        "cluster": allocation.cluster,
        "agents": ", ".join(allocation.agents),
        "IPUs": total,
        "free IPUs": total - sum(each.size for each in own),
        "partitions": _names(own),
    }
    return facts(f"Allocation {name}", known)


def _num_ipus(pod: Pod, agents: Sequence[str]) -> int:
    return sum(agent.num_ipus for agent in pod.agents if agent.name in agents)


def _names(values: Iterable[Partition] | Iterable[Cluster]) -> str:
    return ", ".join(each.name for each in values) or _NOTHING


def cluster_table(pod: Pod) -> str:
    """Return the table of ``list clusters``."""
    rows = (
        (
            *(each.name, each.num_ilds, each.topology, "looped" if each.is_looped else "line"),
            *(_num_ipus(pod, each.agents), ",".join(each.agents)),
        )
        for each in pod.clusters
    )
    return table(("Cluster", "ILDs", "ILD Topology", "Cluster Topology", "IPUs", "Agents"), rows)


def cluster_facts(pod: Pod, name: str, partitions: Iterable[Partition]) -> str:
    """Return what ``get cluster`` shows."""
    cluster = next(each for each in pod.clusters if each.name == name)
    own = [each for each in partitions if each.cluster == name]
    total = _num_ipus(pod, cluster.agents)
    allocations = [each.name for each in pod.allocations if each.cluster == name]
    known = {
        "IPU-Link domains": cluster.num_ilds,
        "topology": cluster.topology,
        "cluster topology": "looped" if cluster.is_looped else "line",
        "agents": ", ".join(cluster.agents),
        "IPUs": total,
        "free IPUs": total - sum(each.size for each in own),
        "allocations": ", ".join(allocations) or _NOTHING,
        "partitions": _names(own),
    }
    return facts(f"Cluster {name}", known)


def agent_table(pod: Pod) -> str:
    """Return the table of ``list agents``."""
    clusters = _cluster_of_agents(pod)
    rows = (
        (each.name, each.host, each.num_ipus, clusters.get(each.name, _NOTHING))
        for each in pod.agents
    )
    return table(("Agent", "Host", "IPUs", "Cluster"), rows)


def _cluster_of_agents(pod: Pod) -> Mapping[str, str]:
    return {agent: cluster.name for cluster in pod.clusters for agent in cluster.agents}


def agent_facts(pod: Pod, agent: Agent, partitions: Iterable[Partition]) -> str:
    """Return what ``get agent`` shows."""
    own = [each for each in partitions if any(ipu.agent == agent.name for ipu in each.ipus)]
    taken = sum(ipu.agent == agent.name for each in own for ipu in each.ipus)
    allocations = [each.name for each in pod.allocations if agent.name in each.agents]
    known = {
        "host": agent.host,
        "IPUs": agent.num_ipus,
        "free IPUs": agent.num_ipus - taken,
        "cluster": _cluster_of_agents(pod).get(agent.name, _NOTHING),
        "allocations": ", ".join(allocations) or _NOTHING,
        "partitions": _names(own),
    }
    return facts(f"Agent {agent.name}", known)


def attribute_rows(
    ipus: Iterable[Ipu], partitions: Iterable[Partition]
) -> list[tuple[str, int, str, str]]:
    """Return the rows of ``list ipu-attrs``: agent, IPU, attribute, value."""
    taken = {ipu.index: each.name for each in partitions for ipu in each.ipus}
    return [
        (ipu.agent, ipu.number, attribute, value)
        for ipu in ipus
        for attribute, value in (
            ("cluster", ipu.cluster),
            ("ipu-link-domain", str(ipu.domain)),
            ("partition", taken.get(ipu.index, _FREE)),
        )
    ]


def attribute_table(rows: Sequence[tuple[str, int, str, str]]) -> str:
    """Return the table of ``list ipu-attrs``."""
    return table(("Agent", "IPU", "Attribute", "Value"), rows)


def pod_facts(pod: Pod, where: str, partitions: Sequence[Partition]) -> str:
    """Return what ``get pod`` shows."""
    total = len(pod.ipus())
    known = {
        "where": where,
        "hosts": ", ".join(dict.fromkeys(agent.host for agent in pod.agents)),
        "agents": len(pod.agents),
        "clusters": _names(pod.clusters),
        "allocations": ", ".join(each.name for each in pod.allocations) or _NOTHING,
        "IPUs": total,
        "free IPUs": total - sum(each.size for each in partitions),
        "partitions": _names(partitions),
        "seconds to create": f"{pod.create_seconds:g}",
        "seconds to reset": f"{pod.reset_seconds:g}",
    }
    return facts(f"Pod {pod.name}", known)
