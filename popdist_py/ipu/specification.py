"""The figures of each type of IPU (tiles, memory, rates and links), with their sources.

To describe another type of IPU, change ``MK1``, ``MK2`` or ``BOW`` with ``dataclasses.replace``.
The module ``specification`` does not compute the memory or the time of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

__all__ = ["BOW", "IPU", "IPUS", "MK1", "MK2", "sources"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IPU:
    """The figures of one type of IPU, such as its number of tiles.

    Attributes:
        name: The name of the type of IPU, such as "mk2". The dictionary ``IPUS`` contains each type
            of IPU under its name.
        tiles: The number of tiles (cores with their own memory) of the IPU.
        tile_bytes: The memory of one tile in bytes.
        clock: The number of clock cycles per second.
        threads: The number of worker threads per tile.
        half_flops: The floating-point operations per tile and clock cycle in a matrix product whose
            operands and partial sums are float16.
        mixed_flops: The floating-point operations per tile and clock cycle in a matrix product
            whose operands are float16 and whose partial sums are float32.
        float_flops: The floating-point operations per tile and clock cycle in a matrix product
            whose operands and partial sums are float32.
        memory_rate: The bytes per clock cycle that a tile moves between its memory and its
            registers.
        exchange_rate: The bytes per clock cycle that a tile receives from other tiles.
        link_bandwidth: The bytes per second over all IPU-Links of the IPU, in both directions
            together. IPU-Links connect an IPU to other IPUs.
        machine_ipus: The number of IPUs of an IPU-Machine, which all have IPU-Links to each other.
        machine_bandwidth: The bytes per second over the IPU-Links from one IPU-Machine to the next,
            in both directions together.
        domain_ipus: The most IPUs that IPU-Links connect. GW-Links connect larger systems.
        gateway_bandwidth: The bytes per second over the GW-Links of an IPU-Machine, in both
            directions together.
        host_bandwidth: The bytes per second between the IPU and the host, in one direction.
        streaming_bandwidth: The bytes per second to and from Streaming Memory (DRAM outside the
            IPU); 0 for an IPU without Streaming Memory.
    """

    name: str
    tiles: int
    tile_bytes: int
    clock: float
    threads: int
    half_flops: int
    mixed_flops: int = 64
    float_flops: int
    memory_rate: int
    exchange_rate: int
    link_bandwidth: float
    machine_ipus: int
    machine_bandwidth: float
    domain_ipus: int
    gateway_bandwidth: float
    host_bandwidth: float
    streaming_bandwidth: float

    @property
    def memory(self) -> int:
        """The memory of all tiles of the IPU together, in bytes."""
        return self.tiles * self.tile_bytes

    def product_rate(self, operands: str, partials: str) -> float:
        """Return the peak rate of matrix products on all tiles, in operations per clock cycle.

        The peak rate counts floating-point operations. The arguments of the method are the element
        types of the matrix product's operands and partial sums.
        """
        if operands != "float16":
            return float(self.tiles * self.float_flops)
        return float(self.tiles * (self.half_flops if partials == "float16" else self.mixed_flops))

    def peak(self, operands: str, partials: str | None = None) -> float:
        """Return the peak rate of matrix products on all tiles, in operations per second.

        The peak rate counts floating-point operations. The arguments of the method are the element
        types of the matrix product's operands and partial sums.
        """
        return self.clock * self.product_rate(operands, partials or operands)


MK1: Final = IPU(
    name="mk1",
    tiles=1216,
    tile_bytes=256 * 1024,
    clock=1.6e9,
    threads=6,
    half_flops=64,
    mixed_flops=64,
    float_flops=16,
    memory_rate=16,
    exchange_rate=4,
    link_bandwidth=320e9,
    machine_ipus=4,
    machine_bandwidth=64e9,
    domain_ipus=64,
    gateway_bandwidth=50e9,
    host_bandwidth=32e9,
    streaming_bandwidth=0.0,
)
MK2: Final = IPU(
    name="mk2",
    tiles=1472,
    tile_bytes=624 * 1024,
    clock=1.33e9,
    threads=6,
    half_flops=128,
    mixed_flops=64,
    float_flops=32,
    memory_rate=24,
    exchange_rate=4,
    link_bandwidth=320e9,
    machine_ipus=4,
    machine_bandwidth=64e9,
    domain_ipus=64,
    gateway_bandwidth=50e9,
    host_bandwidth=32e9,
    streaming_bandwidth=20e9,
)
BOW: Final = IPU(
    name="bow",
    tiles=1472,
    tile_bytes=624 * 1024,
    clock=1.85e9,
    threads=6,
    half_flops=128,
    mixed_flops=64,
    float_flops=32,
    memory_rate=24,
    exchange_rate=4,
    link_bandwidth=320e9,
    machine_ipus=4,
    machine_bandwidth=64e9,
    domain_ipus=64,
    gateway_bandwidth=50e9,
    host_bandwidth=32e9,
    streaming_bandwidth=20e9,
)
IPUS: Final[Mapping[str, IPU]] = MappingProxyType({ipu.name: ipu for ipu in (MK1, MK2, BOW)})

# The words "inferred" and "uncertain" mark figures of an IPU that no document states directly.
_COMMON: Final = {
    "name": "Graphcore's names: GC2 is Mk1, GC200 is Mk2",
    "tiles": "PopTorch user guide, environment variables: ipu1 1,216 tiles, ipu2 1,472 tiles",
    "threads": "Poplar and PopLibs user guide: six worker threads and a supervisor",
    "exchange_rate": "PopLibs' default exchange bytes a cycle; 8 TB/s on Mk2 follows from it",
    "link_bandwidth": "GC200: ten IPU-Links, 320 GB/s a chip",
    "machine_ipus": "Bow-2000 datasheet: four IPUs",
    "machine_bandwidth": "uncertain: 512 Gb/s over IPU-Links (Bow-2000 datasheet)",
    "domain_ipus": "PopRun user guide: an IPU-Link domain is at most a POD64",
    "gateway_bandwidth": "Bow-2000 datasheet: GW-Links of 2 x 100 Gb/s each way",
    "host_bandwidth": "PCIe generation 4 x16: 64 GB/s both ways",
    "streaming_bandwidth": "uncertain: about 20 GB/s an IPU",
}
_OF: Final = {
    "mk1": {
        "tile_bytes": "Jia et al., Dissecting the Graphcore IPU (arXiv 1912.03413): 256 KiB",
        "clock": "the same: six cycles are 3.75 ns",
        "half_flops": "inferred: 124.5 Tflop/s (the same) / tiles / clock",
        "mixed_flops": "the same: 64 operations a cycle in mixed precision",
        "float_flops": "inferred: 31.1 Tflop/s (the same) / tiles / clock",
        "memory_rate": "inferred: two reads of 8 bytes; 31.1 TB/s (the same)",
        "link_bandwidth": "uncertain: that of Mk2",
        "machine_ipus": "uncertain: that of Mk2",
        "machine_bandwidth": "uncertain: that of Mk2",
        "domain_ipus": "uncertain: that of Mk2",
        "gateway_bandwidth": "uncertain: that of Mk2",
        "host_bandwidth": "uncertain: that of Mk2",
        "streaming_bandwidth": "none on Mk1",
    },
    "mk2": {
        "tile_bytes": "Memory and performance guide, text of the error: 638,976 bytes",
        "clock": "inferred: 250 Tflop/s / tiles / 128; 1.35 GHz in the press",
        "half_flops": "inferred: 250 Tflop/s (GC200) / tiles / clock",
        "mixed_flops": "half-precision tutorial: half the rate of float16",
        "float_flops": "half-precision tutorial: a quarter of the rate of float16",
        "memory_rate": "inferred: two reads and one write of 8 bytes; 47.5 TB/s (GC200)",
    },
    "bow": {
        "tiles": "Bow-2000 datasheet: 5,888 tiles in four IPUs",
        "tile_bytes": "inferred: as Mk2; 3.6 GB in four IPUs (Bow-2000 datasheet)",
        "clock": "press: 1.85 GHz",
        "half_flops": "inferred: 350 Tflop/s (Bow-2000 datasheet) / tiles / clock",
        "mixed_flops": "inferred: half the rate of float16",
        "float_flops": "inferred: a quarter of the rate of float16",
        "memory_rate": "inferred: as Mk2; 65 TB/s",
        "link_bandwidth": "inferred: that of Mk2",
    },
}


def sources(ipu: IPU) -> dict[str, str]:
    """Return a mapping from the name of each figure of an IPU to the source of the figure."""
    own = _OF.get(ipu.name, {})
    given = "given by the user"
    return {f.name: own.get(f.name, _COMMON.get(f.name, given)) for f in fields(ipu)}
