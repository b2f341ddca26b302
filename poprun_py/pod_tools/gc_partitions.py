"""Partitions of emulated IPUs: the devices of one, their ids, and the processes that hold them.

Values and arithmetic: nothing here asks the system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from popdist_py.pods.machine import MACHINE_PARTITION
from popdist_py.pods.pod_file import MACHINE_IPUS
from popdist_py.pods.values import IPUS_PER_MACHINE, Device, Ipu, device_id

# What programs have that no launcher started: emulated IPUs do not run out, and a Pod16 is a
# usual system. PopTorch's own limit, 64 IPUs for one process, would fill several screens.
FREE_PARTITION, NUM_FREE_IPUS = MACHINE_PARTITION, MACHINE_IPUS

# Mk2: the generation that ``poptorch.ipuHardwareVersion()`` names.
ARCHITECTURE = "ipu2"
CLOCK_MHZ = 1330
TILES_PER_IPU = 1472
TILE_BYTES = 638_976
MACHINE_TYPE = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds IPUs: the program of one instance, or one that no launcher started.

    ``instance`` is None for the latter. Of instances ``command``, ``user`` and ``seconds``, since
    the start, are only known on this host.
    """

    pid: int
    instance: int | None
    host: str
    ipus: tuple[int, ...] = ()
    command: str = ""
    user: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """IPUs that belong together, numbered from 0; their number is a power of two.

    Attributes:
        name: as V-IPU would know it.
        num_ipus: how many there are.
        host: where no instance says otherwise.
        holders: the processes that hold some of them.
        launcher: process id of the job's launcher; None for the free IPUs, and those of a pod.
        ipus: where they are, in a partition of a pod.
        num_ilds: the IPU-Link domains that they lie in, which no device spans.
        state: whether it can be used, as tables show it.
        is_reconfigurable: whether programs choose the size of their devices.
        owner: the user who made it; empty where none did.
    """

    name: str
    num_ipus: int
    host: str
    holders: tuple[Holder, ...] = ()
    launcher: int | None = None
    ipus: tuple[Ipu, ...] = ()
    num_ilds: int = 1
    state: str = "active"
    is_reconfigurable: bool = True
    owner: str = ""

    def devices(self) -> Iterator[Device]:
        """Return all devices in the order of their ids: single IPUs, pairs, fours, and so on."""
        size = 1
        while size <= self.num_ipus // self.num_ilds:
            for position in range(self.num_ipus // size):
                ipus = range(position * size, (position + 1) * size)
                yield Device(device_id(self.num_ipus, size, position), ipus)
            size *= 2

    def holders_by_ipu(self) -> Mapping[int, Holder]:
        """Return who holds each IPU that is not free."""
        return {ipu: holder for holder in self.holders for ipu in holder.ipus}

    def host_of(self, ipu: int) -> str:
        """Return the host of an IPU: in a job's own partition that of the instance with it."""
        if self.ipus:
            return self.ipus[ipu].host
        holder = self.holders_by_ipu().get(ipu)
        return holder.host if holder is not None else self.host

    def number_of(self, ipu: int) -> int:
        """Return the IPU# of an IPU: within a machine they count down."""
        if self.ipus:
            return self.ipus[ipu].number
        return IPUS_PER_MACHINE - 1 - ipu % IPUS_PER_MACHINE


def free_partition(host: str) -> Partition:
    """Return the IPUs that no job holds."""
    return Partition(FREE_PARTITION, NUM_FREE_IPUS, host)


def find_partition(partitions: Sequence[Partition], name: str | None) -> Partition:
    """Return the partition of this name, or where there is none, the free one."""
    return next((each for each in partitions if each.name == name), partitions[0])
