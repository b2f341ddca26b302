"""The numbers of IPUs in a machine and in a rack, and Poplar's numbers of devices.

The module is small because each launch imports it.
"""

from __future__ import annotations

# IPU-Links connect at most the IPUs of one rack. GW-Links connect racks.
LINK_DOMAIN_IPUS = 64
IPUS_PER_MACHINE = 4


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is ``number`` or larger."""
    return 1 << (number - 1).bit_length()


def device_id(num_ipus: int, device_size: int, position: int) -> int:
    """Return Poplar's id of the ``position``-th device of ``device_size`` IPUs.

    A system of N IPUs numbers its single IPUs first (0 to N - 1), then the pairs, then the fours,
    and so on: devices of s IPUs start at 2N - 2N/s. Counts are rounded up to powers of two.
    Source: the ids in PopRun's logs (16 IPUs in fours: 24 to 27; the parent of 64 IPUs: 126).
    """
    total = next_power_of_two(num_ipus)
    size = next_power_of_two(device_size)
    return 2 * total - 2 * total // size + position
