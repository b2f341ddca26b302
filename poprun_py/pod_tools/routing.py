"""How the links of a partition are routed, as V-IPU names it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from popdist_py.pods.values import IPUS_PER_MACHINE, LINK_DOMAIN_IPUS, Cluster, Partition

# What the command line takes: V-IPU's names over time, and how tables call them.
ROUTINGS = {
    "default": "",
    "dnc": "DNC",
    "swnc": "SWNC",
    "btnc": "BTNC",
    "ringswnc": "RINGSWNC",
    "ring-swnc": "RINGSWNC",
}


def ild_routing(partition: Partition, clusters: Mapping[str, Cluster]) -> str:
    """Return the routing within an IPU-Link domain, as V-IPU's default chooses it.

    Within one IPU-Machine every IPU reaches every other (DNC). A larger partition slides its
    window along the links (SWNC); one of a whole rack whose loop is closed uses the ring.
    """
    per_domain = partition.size // partition.num_ilds
    if per_domain <= IPUS_PER_MACHINE:
        return "DNC"
    cluster = clusters.get(partition.cluster)
    is_torus = cluster is not None and cluster.topology == "torus"
    return "RINGSWNC" if is_torus and per_domain == LINK_DOMAIN_IPUS else "SWNC"


def gw_routing(partition: Partition, clusters: Mapping[str, Cluster]) -> str:
    """Return the routing between IPU-Link domains: a ring where the GW-Links are looped."""
    if partition.num_ilds == 1:
        return "DEFAULT"
    cluster = clusters.get(partition.cluster)
    return "RING" if cluster is not None and cluster.is_looped else "SWRING"


def misrouted(partition: Partition, clusters: Mapping[str, Cluster], asked: str) -> str:
    """Say how a partition is routed where it is not as ``asked``, a key of ROUTINGS; else empty."""
    wanted, has = ROUTINGS[asked], ild_routing(partition, clusters)
    if wanted in ("", has):
        return ""
    return (
        f"partition {partition.name} has the routing {has}, not {wanted}: its size and the "
        "topology of its cluster choose it, and emulated IPUs give the same numbers with each"
    )
