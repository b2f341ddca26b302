"""The report about the memory that a model needs on IPUs.

The attributes and the JSON of the report give memory in bytes. The text of the report gives memory
in MB of a million bytes. The package ``ipu`` computes the figures in the tables of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from popdist_py.errors import counted
from popdist_py.ipu.documents.document import Column, Course, Document, Section, Share
from popdist_py.ipu.documents.report import Report
from popdist_py.ipu.memory import memory
from popdist_py.ipu.memory_contents import (
    UNCERTAINTY,
    Category,
    IpuMemory,
    MemoryReport,
    Verdict,
    share_of,
)
from popdist_py.ipu.reports.memory_over_time import LiveBytes, curve
from popdist_py.ipu.searches import Run
from popdist_py.ipu.what_if import INCOMPLETE, OutOfMemory, explain

__all__ = ["MemoryPage", "memory_page"]

# The version of the report's JSON format. The version is increased when a key is removed or gets
# another meaning. In version 2, ``fits`` is False for a model that is close to the limit.
_VERSION: Final = 2
_LARGEST: Final = 5
_IPUS_IN_A_ROW: Final = 8


@dataclass(frozen=True, slots=True)
class MemoryPage(Report):
    """The report about the memory that every IPU of a replica needs.

    Attributes:
        device: The name of the type of IPU, such as "mk2".
        tile_bytes: The memory of one tile in bytes.
        ipus: The contents of the memory of each IPU.
        curves: For each IPU, the used bytes at every moment of a micro-batch and of the weight
            update.
        problem: The explanation why the model does not fit into memory or is close to the limit,
            with advice; None if it fits.
    """

    device: str
    tile_bytes: int
    ipus: tuple[IpuMemory, ...]
    curves: tuple[tuple[LiveBytes, ...], ...]
    problem: OutOfMemory | None

    @property
    def share(self) -> float:
        """The bytes that the fullest tile of all IPUs needs, divided by the memory of a tile."""
        return MemoryReport(self.ipus).share

    @property
    def verdict(self) -> Verdict:
        """Whether the model fits on the IPUs, is close to the limit, or does not fit."""
        return MemoryReport(self.ipus).verdict

    @property
    def fits(self) -> bool:
        """Whether the model fits into the memory of every IPU, and is not close to the limit."""
        return self.verdict == "fits"

    def document(self) -> Document:
        """Return the headline and tables that display this report."""
        number = len(self.ipus)
        where = counted(number, f"{self.device} IPU")
        said = "close to the limit" if self.verdict == "close" else self.verdict
        headline = (
            f"Memory: {said} on {where}; the fullest tile needs {share_of(self.share)} its "
            f"{self.tile_bytes:,} bytes"
        )
        sections = (*self._advice(), self._ipus(), *self._categories(), self._contributions())
        return Document(headline, self.fits, (*sections, self._curves()))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON values.

        In the report's dictionary, memory is given in bytes. The entry ``advice`` of the report is
        an empty list if the model fits into memory. The entry ``uncertainty`` is the uncertainty of
        every ``share``, the used part of the fullest tile.
        """
        return {
            "version": _VERSION,
            "report": "memory",
            "device": self.device,
            "tile_bytes": self.tile_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "share": self.share,
            "uncertainty": UNCERTAINTY,
            "ipus": [
                {
                    "ipu": own.ipu,
                    "tiles": own.tiles,
                    "needed": own.needed,
                    "capacity": own.capacity,
                    "per_tile": own.per_tile,
                    "fullest_tile": own.fullest_tile,
                    "io_tiles": own.io_tiles,
                    "fullest_io_tile": own.fullest_io_tile,
                    "always_live": own.always_live,
                    "not_always_live": own.not_always_live,
                    "peak_at": own.peak_at,
                    "fits": own.fits,
                    "verdict": own.verdict,
                    "share": own.share,
                    "by_category": dict(own.by_category()),
                    "largest": [asdict(part) for part in own.largest(_LARGEST)],
                    "liveness": [[point.moment, point.bytes] for point in live],
                }
                for own, live in zip(self.ipus, self.curves, strict=True)
            ],
            "advice": [asdict(one) for one in self.problem.advice] if self.problem else [],
            "together": [asdict(one) for one in self.problem.together] if self.problem else [],
            "more_ipus": self.problem.more_ipus if self.problem else "",
            "is_complete": self.problem.is_complete if self.problem else True,
        }

    def _advice(self) -> Iterator[Section]:
        if self.problem is None or not self.problem.advice:
            return
        numbers = Column("MB less"), Column("time", True)
        change = Column("change", True, wraps=True)
        rows = tuple(
            (_mb(one.saved), one.time, "fits" if one.fits else "", one.change)
            for one in self.problem.advice
        )
        columns = (*numbers, Column("then", True), change)
        yield Section("Changes that would save memory, each alone", columns, rows)
        if len(self.problem.together) > 1:
            steps = tuple((_mb(o.saved), o.time, o.change) for o in self.problem.together)
            yield Section("Changes that together make the model fit", (*numbers, change), steps)
        if self.problem.more_ipus:
            yield Section("More IPUs", notes=(f"The model also fits on {self.problem.more_ipus}",))
        if not self.problem.is_complete:
            yield Section("What is missing", notes=(INCOMPLETE,))
        how = tuple(f"{one.change}: {one.how}" for one in self.problem.advice if one.how)
        if how:
            yield Section("How", notes=how)

    def _ipus(self) -> Section:
        names = ("IPU", "needed", "available", "share", "always live", "at the peak")
        columns = (*map(Column, names), Column("fullest tile"), Column("peak at", True))
        rows = tuple(
            (
                str(own.ipu),
                _mb(own.needed),
                _mb(own.capacity),
                Share(own.needed / own.capacity),
                _mb(own.always_live),
                _mb(own.not_always_live),
                f"{_fullest(own):,}",
                own.peak_at,
            )
            for own in self.ipus
        )
        note = f"A tile has {self.tile_bytes:,} bytes."
        return Section("IPUs (MB; bytes of a tile)", columns, rows, (note,))

    def _categories(self) -> Iterator[Section]:
        """Yield one table for every eight IPUs, because more columns do not fit into a line."""
        for first in range(0, len(self.ipus), _IPUS_IN_A_ROW):
            some = self.ipus[first : first + _IPUS_IN_A_ROW]
            sums = {own.ipu: own.by_category() for own in some}
            total: Counter[Category] = Counter()
            for one in sums.values():
                total.update(one)
            columns = (Column("category", True), *(Column(f"IPU {ipu}") for ipu in sums))
            rows = tuple(
                (name, *(_mb(one.get(name, 0)) for one in sums.values()))
                for name, size in total.most_common()
                if size
            )
            yield Section("By category (MB)", columns, rows)

    def _contributions(self) -> Section:
        columns = (
            *(Column("IPU"), Column("MB"), Column("share")),
            *(Column("category", True), Column("live", True)),
            Column("of", True),
        )
        rows = tuple(
            (
                str(own.ipu),
                _mb(part.bytes),
                str(Share(part.bytes / own.capacity)),
                part.category,
                "always" if part.is_always_live else "at the peak",
                part.name,
            )
            for own in self.ipus
            for part in own.largest(_LARGEST)
        )
        return Section("Largest contributions", columns, rows)

    def _curves(self) -> Section:
        columns = (Column("IPU"), Column("moments"), Column("from nothing to the peak", True))
        rows = tuple(
            (
                str(own.ipu),
                str(len(live)),
                _course(own, live),
            )
            for own, live in zip(self.ipus, self.curves, strict=True)
        )
        return Section("Not always live, over forward, backward and update", columns, rows)


def _course(own: IpuMemory, live: Sequence[LiveBytes]) -> Course:
    """Return the line of an IPU's bytes that are not always in memory, as shares of the peak."""
    always, most = own.always_live, own.not_always_live or 1
    return Course(tuple((point.bytes - always) / most for point in live))


def memory_page(run: Run) -> MemoryPage:
    """Return the report about a model's memory on IPUs, with advice if the memory is too small."""
    report = memory(run.graph, run.placement, run.settings, run.ipu, run.estimates)
    return MemoryPage(
        device=run.ipu.name,
        tile_bytes=run.ipu.tile_bytes,
        ipus=report.ipus,
        curves=tuple(curve(run, own) for own in report.ipus),
        problem=explain(run),
    )


def _fullest(own: IpuMemory) -> int:
    """Return the bytes on the fullest tile of an IPU, which may be an I/O tile."""
    return max(own.fullest_tile, own.fullest_io_tile)


def _mb(size: int) -> str:
    return "<0.1" if 0 < size < 50_000 else f"{size / 1e6:,.1f}"
