"""A pod and its parts as JSON, in the shapes that scripts around V-IPU read.

Pure: values in, documents out. The shapes: ``list partitions`` is an array of ``{"partition":
{"id", "spec", ...}}``, ``list clusters`` one of ``{"id", "spec": {"ipu_link_domains": ...}}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popdist_py.pods.values import Agent, Allocation, Attachment, Cluster, Ipu, Partition, Pod
from poprun_py.pod_tools.routing import gw_routing, ild_routing

# Mk2.
_IPU_ARCHITECTURE = "ipu2"
_FIRST_PORT = 50051


def partition_document(
    pod: Pod, partition: Partition, attachments: Iterable[Attachment]
) -> dict[str, Any]:
    """Return a partition, and who holds IPUs of it."""
    clusters = {cluster.name: cluster for cluster in pod.clusters}
    return {
        "partition": {
            "id": partition.name,
            "spec": {
                "size": partition.size,
                "allocation_id": partition.allocation,
                "cluster_id": partition.cluster,
                "num_ipulink_segments": partition.num_ilds,
                "ipulink_routing_type": ild_routing(partition, clusters),
                "gw_routing_type": gw_routing(partition, clusters),
                "sync_type": partition.sync_type.value,
                "num_gcds": partition.num_gcds,
                "num_replicas": partition.num_replicas,
                "reconfigurable": partition.reconfigurable,
                "ipus": [
                    {
                        "id": number,
                        "gcd": number * partition.num_gcds // partition.size,
                        "ipulink_segment_id": partition.domain_of(number),
                        **_ipu(ipu),
                    }
                    for number, ipu in enumerate(partition.ipus)
                ],
            },
            "status": {
                "ready_state": f"PS_{partition.state.value}",
                "operation_state": f"POS_{partition.operation.value}",
                "error": partition.error,
                "num_resets": partition.generation,
            },
            "owner": partition.owner,
            "created": partition.created,
            "holders": [_holder(each) for each in attachments if each.partition == partition.name],
        }
    }


def _ipu(ipu: Ipu) -> dict[str, Any]:
    return {
        "index": ipu.index,
        "agent": ipu.agent,
        "host": ipu.host,
        "ipu_number": ipu.number,
        "cluster_id": ipu.cluster,
        "ipulink_domain": ipu.domain,
    }


def _holder(attachment: Attachment) -> dict[str, Any]:
    """Return who holds what: never the id, which is the holder's secret."""
    holder = attachment.holder
    return {
        "user": holder.user,
        "program": holder.program,
        "pid": holder.pid,
        "host": holder.host,
        "run_id": holder.run_id,
        "ipus": list(attachment.ipus),
        "since": attachment.since,
    }


def device_documents(
    pod: Pod, partitions: Sequence[Partition], attachments: Sequence[Attachment]
) -> list[dict[str, Any]]:
    """Return every IPU of the pod: ``partition``, ``id`` in it and ``holder``, null where free."""
    taken = {
        ipu.index: (each.name, number)
        for each in partitions
        for number, ipu in enumerate(each.ipus)
    }
    held = {(each.partition, ipu): _holder(each) for each in attachments for ipu in each.ipus}
    found = []
    for ipu in pod.ipus():
        place = taken.get(ipu.index)
        found.append(
            {
                **_ipu(ipu),
                "partition": place[0] if place else None,
                "id": place[1] if place else None,
                "holder": held.get(place) if place else None,
            }
        )
    return found


def cluster_document(pod: Pod, cluster: Cluster) -> dict[str, Any]:
    """Return a cluster, with the IPUs of each of its IPU-Link domains."""
    ipus = [ipu for ipu in pod.ipus() if ipu.cluster == cluster.name]
    return {
        "id": cluster.name,
        "spec": {
            "agents": list(cluster.agents),
            "topology": cluster.topology,
            "cluster_topology": "looped" if cluster.is_looped else "line",
            "ipu_link_domains": [
                {"ipus": [_ipu(ipu) for ipu in ipus if ipu.domain == domain]}
                for domain in range(cluster.num_ilds)
            ],
        },
    }


def allocation_document(allocation: Allocation) -> dict[str, Any]:
    """Return an allocation."""
    spec = {"cluster_id": allocation.cluster, "agents": list(allocation.agents)}
    return {"id": allocation.name, "spec": spec}


def agent_document(pod: Pod, agent: Agent) -> dict[str, Any]:
    """Return an agent; ``cluster_id`` is null where it belongs to none."""
    clusters = {name: each.name for each in pod.clusters for name in each.agents}
    spec = {
        "host": agent.host,
        "num_ipus": agent.num_ipus,
        "cluster_id": clusters.get(agent.name),
    }
    return {"id": agent.name, "spec": spec}


def pod_document(pod: Pod, where: str, partitions: Sequence[Partition]) -> dict[str, Any]:
    """Return a pod as a whole."""
    total = len(pod.ipus())
    return {
        "id": pod.name,
        "where": where,
        "num_ipus": total,
        "num_free_ipus": total - sum(each.size for each in partitions),
        "create_seconds": pod.create_seconds,
        "reset_seconds": pod.reset_seconds,
        "agents": [agent_document(pod, each) for each in pod.agents],
        "clusters": [each.name for each in pod.clusters],
        "allocations": [allocation_document(each) for each in pod.allocations],
        "partitions": [each.name for each in partitions],
    }


def ipuof_config(partition: Partition, gcd: int) -> Mapping[str, Any]:
    """Return the IPUoF configuration of one GCD: its IPUs, and its number, which 0 leaves out.

    The field names are those of V-IPU's protocol; emulated IPUs listen on no port, so that the
    ports only tell the IPUs of one host apart.
    """
    share = partition.size // partition.num_gcds
    devices = [
        {
            "ip": ipu.host,
            "server_port": _FIRST_PORT + ipu.index,
            "rdma_port": _FIRST_PORT + ipu.index,
            "device_id": ipu.number,
            "ipulink_segment_id": partition.domain_of(gcd * share + number),
            "routing_id": number,
            "ipu_arch_id": _IPU_ARCHITECTURE,
            "ipu_id": ipu.index,
            "chip_id": ipu.number,
            "versions": {"emulated": "1"},
        }
        for number, ipu in enumerate(partition.ipus[gcd * share : (gcd + 1) * share])
    ]
    return {"devices": devices, "attributes": {"GCD Id": str(gcd)} if gcd else {}}
