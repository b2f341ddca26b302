"""The rate of the links between IPUs in a ring all-reduce over replicas.

The rate depends on the connections that a ring uses: between the IPUs of one IPU-Machine, between
IPU-Machines, or between IPU-Link domains. Replicas are assumed to lie one after the other, so that
the number of IPUs decides how many IPU-Machines and IPU-Link domains a run uses. The module
``links`` does not count bytes.
"""

from __future__ import annotations

from popdist_py.ipu.specification import IPU

__all__ = ["ring_bandwidth"]


def ring_bandwidth(ipu: IPU, replicas: int, ipus_per_replica: int, ring_share: float) -> float:
    """Return the bytes per second that each IPU sends to the next IPU of its ring.

    For each IPU of a replica, one ring connects the IPU with the same IPU of all other replicas.
    The slowest connection of a ring determines the rate of the whole ring. All rings that leave an
    IPU-Machine share its links to the next IPU-Machine.

    Args:
        ipu: The figures of the IPUs and of their links.
        replicas: The number of replicas of all instances together.
        ipus_per_replica: The number of IPUs of each replica.
        ring_share: The share of an IPU's IPU-Links that a ring uses inside an IPU-Machine.
    """
    num_ipus = replicas * ipus_per_replica
    rings = min(ipus_per_replica, ipu.machine_ipus)
    rates = [ring_share * ipu.link_bandwidth / 2]
    if num_ipus > ipu.machine_ipus:
        rates.append(ipu.machine_bandwidth / 2 / rings)
    if num_ipus > ipu.domain_ipus:
        rates.append(ipu.gateway_bandwidth / 2 / rings)
    return min(rates)
