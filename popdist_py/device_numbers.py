"""The numbers of IPUs in a machine and in a rack, and Poplar's numbering of devices.

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
    """Return Poplar's id of the device at index ``position`` among devices of ``device_size`` IPUs.

    A system of N IPUs first numbers its single IPUs from 0 to N - 1. Pairs of IPUs get the next
    ids, then groups of four IPUs, and so on. The ids of devices with s IPUs start at 2N - 2N/s. N
    and s are rounded up to powers of two. This rule was derived from the ids in PopRun's logs. With
    16 IPUs in groups of four, the ids are 24 to 27. The parent device of 64 IPUs has the id 126.
    """
    total = next_power_of_two(num_ipus)
    size = next_power_of_two(device_size)
    return 2 * total - 2 * total // size + position
