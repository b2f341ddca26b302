"""What the memory of an IPU holds, as values: each part, the fullest tile, whether there is room.

Nothing here works out what a graph needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Category", "Contribution", "IpuMemory", "MemoryReport"]

Category: TypeAlias = Literal[
    "weights",
    "accumulators",
    "optimiser state",
    "stash",
    "code",
    "profiling",
    "streams",
    "activations",
    "gradients",
    "working set",
    "gaps",
]


@dataclass(frozen=True, slots=True)
class Contribution:
    """Part of an IPU's memory.

    Attributes:
        name: of a weight, an operation or a tensor, with its module.
        category: what it is.
        bytes: on the whole IPU.
        is_always_live: whether it stays during the whole run.
    """

    name: str
    category: Category
    bytes: int
    is_always_live: bool

    def group(self, depth: int) -> str:
        """Return the name under which it is counted together with others of its category."""
        if self.category in ("code", "profiling"):
            return "the whole program"
        if self.category == "working set":
            return self.name
        return ".".join(self.name.split(".")[:depth])


@dataclass(frozen=True, slots=True)
class IpuMemory:
    """Memory of one IPU.

    A tile that lacks room makes a program impossible, whatever the others have left.

    Attributes:
        ipu: which one.
        tiles: over which everything is spread; I/O tiles are others.
        tile_bytes: memory of a tile.
        contributions: what is always live, and what is live at the peak of the rest.
        peak_at: when that is.
        fullest_tile: bytes of the tile that holds most.
        io_tiles: how many there are.
        fullest_io_tile: bytes of the one of them that holds most: buffers of the host's streams.
    """

    ipu: int
    tiles: int
    tile_bytes: int
    contributions: tuple[Contribution, ...]
    peak_at: str
    fullest_tile: int
    io_tiles: int = 0
    fullest_io_tile: int = 0

    @property
    def capacity(self) -> int:
        """Bytes of the tiles, I/O tiles left out."""
        return self.tiles * self.tile_bytes

    @property
    def always_live(self) -> int:
        """Bytes that stay during the whole run."""
        return sum(part.bytes for part in self.contributions if part.is_always_live)

    @property
    def not_always_live(self) -> int:
        """Bytes of the rest, at its peak."""
        return sum(part.bytes for part in self.contributions if not part.is_always_live)

    @property
    def needed(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.contributions)

    @property
    def per_tile(self) -> int:
        """Bytes of a tile if all held the same."""
        return -(-self.needed // self.tiles)

    @property
    def fits(self) -> bool:
        """Whether there is room on every tile."""
        return max(self.fullest_tile, self.fullest_io_tile) <= self.tile_bytes

    def by_category(self) -> dict[Category, int]:
        """Return the bytes of each category, largest first."""
        sums: dict[Category, int] = {}
        for part in self.contributions:
            sums[part.category] = sums.get(part.category, 0) + part.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def largest(self, count: int = 5, *, depth: int = 2) -> tuple[Contribution, ...]:
        """Return the largest contributions, largest first.

        Those of a category whose modules have the same first ``depth`` names count as one
        (``layer4.0.conv1`` and ``layer4.0.conv2`` are ``layer4.0``), and all code does.
        """
        sums: dict[tuple[str, Category, bool], int] = {}
        for part in self.contributions:
            key = part.group(depth), part.category, part.is_always_live
            sums[key] = sums.get(key, 0) + part.bytes
        merged = [Contribution(name, kind, size, live) for (name, kind, live), size in sums.items()]
        return tuple(sorted(merged, key=lambda part: (-part.bytes, part.name))[:count])


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of all IPUs of a replica."""

    ipus: tuple[IpuMemory, ...]

    @property
    def fits(self) -> bool:
        """Whether there is room on every IPU."""
        return all(ipu.fits for ipu in self.ipus)

    @property
    def fullest(self) -> IpuMemory:
        """The IPU with the least room, or that lacks the most."""
        return max(self.ipus, key=lambda ipu: max(ipu.fullest_tile, ipu.fullest_io_tile))
