"""Classes for the data and code in the memory of IPUs, and for whether the memory suffices.

Whether the memory suffices is a verdict of three words: "fits", "close" and "does not fit". The
verdict "close" says that the estimate is nearer to the limit than its uncertainty.

The module ``memory`` computes the contents of the memory from a graph of operations. The module
``memory_contents`` only defines classes, and does not estimate memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from popdist_py.ipu.documents.document import Share

__all__ = [
    "UNCERTAINTY",
    "Category",
    "Contribution",
    "IpuMemory",
    "MemoryReport",
    "Verdict",
    "share_of",
    "verdict_of",
]

# The uncertainty of an estimate of memory, as a share of a tile's memory. ``UNCERTAINTY`` is
# assumed. The estimate cannot be more exact, because it does not know how Poplar lays out the
# variables and the code of a tile. The published runs show that all estimates together may be
# multiplied by a factor between 0.92 and 1.38 before a published run changes sides of the limit.
UNCERTAINTY: Final = 0.05

Verdict: TypeAlias = Literal["fits", "close", "does not fit"]

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


def verdict_of(share: float) -> Verdict:
    """Return whether an estimated share of a tile's memory fits, with regard to the uncertainty.

    Args:
        share: The estimated bytes on the fullest tile, divided by the memory of one tile.
    """
    if share <= 1 - UNCERTAINTY:
        return "fits"
    return "close" if share <= 1 + UNCERTAINTY else "does not fit"


def share_of(share: float, sign: str = "+-") -> str:
    """Return a share of a tile's memory with its uncertainty, as the beginning of "its memory".

    The uncertainty of a very large share is left out: ``108.5% +- 5% of``, but ``18,299 times``.

    Args:
        share: The estimated bytes on the fullest tile, divided by the memory of one tile.
        sign: The sign between the share and its uncertainty.
    """
    text = Share(share)
    return str(text) if text.is_multiple else f"{text} {sign} {UNCERTAINTY:.0%} of"


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution to the used memory of an IPU, such as one weight.

    Attributes:
        name: The name of a weight, an operation or a tensor, with the name of its module.
        category: The category of this contribution to the used memory, such as "activations".
        bytes: The bytes of this contribution on all tiles of the IPU together.
        is_always_live: Whether this contribution stays in memory during the whole run of the
            program.
    """

    name: str
    category: Category
    bytes: int
    is_always_live: bool

    def group(self, depth: int) -> str:
        """Return the name under which a table of sums adds up this contribution.

        A table of sums adds up the contributions to the used memory that have the same category and
        for which ``group`` returns the same name.
        """
        if self.category in ("code", "profiling"):
            return "the whole program"
        if self.category == "working set":
            return self.name
        return ".".join(self.name.split(".")[:depth])


@dataclass(frozen=True, slots=True)
class IpuMemory:
    """The data and code in the memory of one IPU.

    A program cannot run if one tile has too little memory, even if other tiles have free memory.

    Attributes:
        ipu: The number of the IPU in its replica.
        tiles: The number of tiles that store the ``contributions``. I/O tiles are not counted.
        tile_bytes: The memory of one tile in bytes.
        contributions: The data and code that always stay in memory, and the temporary data at the
            moment when the IPU needs the most memory.
        peak_at: The name of the operation and its pass (such as "backward") when the IPU needs the
            most memory.
        fullest_tile: The bytes that the program needs on the fullest tile.
        io_tiles: The number of I/O tiles, which only transfer data.
        fullest_io_tile: The bytes that the program needs on the fullest I/O tile. I/O tiles contain
            code, and buffers for data from and to the host.
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
        """The memory of all tiles except I/O tiles, in bytes."""
        return self.tiles * self.tile_bytes

    @property
    def always_live(self) -> int:
        """The bytes that stay in the IPU's memory during the whole run of the program."""
        return sum(part.bytes for part in self.contributions if part.is_always_live)

    @property
    def not_always_live(self) -> int:
        """The temporary bytes in memory at the moment when the IPU needs the most memory."""
        return sum(part.bytes for part in self.contributions if not part.is_always_live)

    @property
    def needed(self) -> int:
        """The largest number of bytes that the program needs in the IPU's memory at any moment."""
        return sum(part.bytes for part in self.contributions)

    @property
    def per_tile(self) -> int:
        """The bytes per tile, if data and code were distributed equally over the IPU's tiles."""
        return -(-self.needed // self.tiles)

    @property
    def share(self) -> float:
        """The bytes that the fullest tile of the IPU needs, divided by the memory of a tile."""
        return max(self.fullest_tile, self.fullest_io_tile) / self.tile_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the fullest tile fits: "fits", "close" to the limit, or "does not fit"."""
        return verdict_of(self.share)

    @property
    def fits(self) -> bool:
        """Whether every tile of the IPU has enough memory, even if the estimate is too low.

        The attribute ``fits`` is False for the verdict "close".
        """
        return self.verdict == "fits"

    def by_category(self) -> dict[Category, int]:
        """Return the bytes of each category, such as "weights", with the largest first."""
        sums: dict[Category, int] = {}
        for part in self.contributions:
            sums[part.category] = sums.get(part.category, 0) + part.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def largest(self, count: int = 5, *, depth: int = 2) -> tuple[Contribution, ...]:
        """Return the largest contributions to the IPU's memory, with the largest first.

        Contributions of one category are added up if the first ``depth`` parts of their names
        (separated by dots) are equal. For example, ``layer4.0.conv1`` and ``layer4.0.conv2`` are
        added up as ``layer4.0``. The code of the whole program counts as one contribution to the
        used memory.
        """
        sums: dict[tuple[str, Category, bool], int] = {}
        for part in self.contributions:
            key = part.group(depth), part.category, part.is_always_live
            sums[key] = sums.get(key, 0) + part.bytes
        merged = [Contribution(name, kind, size, live) for (name, kind, live), size in sums.items()]
        return tuple(sorted(merged, key=lambda one: (-one.bytes, one.name, one.category))[:count])


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The data and code in the memory of every IPU of a replica."""

    ipus: tuple[IpuMemory, ...]

    @property
    def share(self) -> float:
        """The bytes that the fullest tile of all IPUs needs, divided by the memory of a tile."""
        return self.fullest.share

    @property
    def verdict(self) -> Verdict:
        """Whether the fullest tile of all IPUs fits, is close to the limit, or does not fit."""
        return self.fullest.verdict

    @property
    def fits(self) -> bool:
        """Whether every IPU has enough memory, even if the estimate is too low.

        The attribute ``fits`` is False for the verdict "close".
        """
        return self.verdict == "fits"

    @property
    def fullest(self) -> IpuMemory:
        """The ``IpuMemory`` of the IPU that contains the fullest tile of all IPUs."""
        return max(self.ipus, key=lambda ipu: ipu.share)
