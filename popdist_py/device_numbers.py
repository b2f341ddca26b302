"""How many IPUs belong together, and Poplar's numbers of devices. Every launch imports it: no more.

Nothing here knows of partitions or pods.
"""

from __future__ import annotations

__all__ = ["IPUS_PER_MACHINE", "LINK_DOMAIN_IPUS", "device_id"]

# One rack: no more IPUs are joined by IPU-Links; domains are joined by GW-Links.
LINK_DOMAIN_IPUS = 64
IPUS_PER_MACHINE = 4


def device_id(num_ipus: int, device_size: int, position: int) -> int:
    """Return Poplar's id of the ``position``-th device of ``device_size`` IPUs.

    A system of N IPUs numbers its single IPUs first (0 to N - 1), then the pairs, then the fours,
    and so on: devices of s IPUs start at 2N - 2N/s. Counts are rounded up to powers of two.
    Source: the ids in PopRun's logs (16 IPUs in fours: 24 to 27; the parent of 64 IPUs: 126).
    """
    total = 1 << (num_ipus - 1).bit_length()
    size = 1 << (device_size - 1).bit_length()
    return 2 * total - 2 * total // size + position
