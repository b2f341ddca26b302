"""The numbers of IPUs in a machine and in a rack, and Poplar's numbering of devices.

This module is small because each launch imports it.
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

    In a system of N IPUs, the devices with one IPU have the ids 0 to N - 1. The devices with two
    IPUs have the next ids, then the devices with four IPUs, and so on. The ids of devices with s
    IPUs start at 2N - 2N/s. If N or s is not a power of two, it is rounded up to the next power of
    two. These rules were derived from the device ids in PopRun's logs. For example, the devices of
    four IPUs in a system of 16 IPUs have the ids 24 to 27. The device that contains all IPUs of a
    64-IPU system has the id 126.
    """
    total = next_power_of_two(num_ipus)
    size = next_power_of_two(device_size)
    return 2 * total - 2 * total // size + position
