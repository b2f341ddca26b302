"""The section "Liveness Report" of a page: used memory at every moment, and live variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from popdist_py.html_pages.chart_colours import LIGHT
from popdist_py.html_pages.charts import Mark, thinned
from popdist_py.html_pages.page import Cell, Chart, Details, Part, Section, Sentence, Table
from popdist_py.html_pages.program_charts import Area, areas
from popdist_py.ipu.memory_contents import IpuMemory
from popdist_py.ipu.page.charted_values import category_style, megabytes, not_shown, percent
from popdist_py.ipu.reports import MemoryPage
from popdist_py.ipu.reports.memory_over_time import LiveBytes, live_categories
from popdist_py.ipu.searches import Run

__all__ = ["liveness_section"]

_MOST_IPUS: Final = 4
_MOST_POINTS: Final = 600
_MOST_VARIABLES: Final = 25


def liveness_section(run: Run, memory: MemoryPage) -> Section:
    """Return the section with the used memory of the fullest IPUs over time."""
    ordered = sorted(
        zip(memory.ipus, memory.curves, strict=True), key=lambda pair: -pair[0].share
    )  # fmt: skip
    drawn = sorted(ordered[:_MOST_IPUS], key=lambda pair: pair[0].ipu)
    parts: list[Part] = []
    for own, curve in drawn:
        parts.append(_chart(run, own, curve))
        parts += _variables(own)
    if len(ordered) > len(drawn):
        parts.append(
            Sentence(f"The {len(drawn)} fullest of {len(ordered)} IPUs are shown in this section.")
        )
    return Section("Liveness Report", tuple(parts))


def _chart(run: Run, own: IpuMemory, curve: Sequence[LiveBytes]) -> Chart:
    kept = thinned([point.bytes for point in curve], _MOST_POINTS)
    sums = live_categories(run, own.ipu, frozenset(kept))
    names = list(dict.fromkeys(name for one in sums for name in one))
    layers = [
        Area(
            "always live",
            [
                (curve[index].bytes - sum(one.values())) / 1e6
                for index, one in zip(kept, sums, strict=True)
            ],
            LIGHT["grid"],
        ),
        *(
            Area(name, [one.get(name, 0) / 1e6 for one in sums], *category_style(name))
            for name in names
        ),
    ]
    order = "The forward pass comes first, then the backward pass and the weight update."
    summary = (
        f"{megabytes(own.always_live)} MB are always live. At most {megabytes(own.not_always_live)}"
        f" MB are not always live, at {own.peak_at}."
    )
    if run.settings.is_training:
        summary += f" {order}"
    return areas(
        f"Memory of IPU {own.ipu} over time",
        summary,
        layers,
        kept,
        [curve[index].moment for index in kept],
        x=f"moments of a micro-batch ({len(curve):,} in all)",
        y="MB",
        marks=[Mark(own.capacity / 1e6, "available", of_y=True)]
        if own.needed > own.capacity / 2
        else [],
    )


def _variables(own: IpuMemory) -> Iterator[Part]:
    for is_always, title in ((True, "Always Live Variables"), (False, "Not Always Live Variables")):
        parts = sorted(
            (part for part in own.contributions if part.is_always_live == is_always and part.bytes),
            key=lambda part: (-part.bytes, part.name),
        )
        rows = [
            (
                megabytes(part.bytes),
                Cell(percent(part.bytes / own.capacity), share=min(1, part.bytes / own.capacity)),
                part.category,
                part.name,
            )
            for part in parts[:_MOST_VARIABLES]
        ]
        if not rows:
            continue
        columns = ("MB", "of the IPU", "category", "variable")
        name = f"{title} of IPU {own.ipu}"
        if not is_always:
            name += f" at {own.peak_at}"
        inner: list[Part] = [Table(name, columns, rows, is_sortable=True)]
        left_out = [part.bytes for part in parts[_MOST_VARIABLES:]]
        if left_out:
            total = sum(part.bytes for part in parts)
            inner.append(Sentence(not_shown(left_out, total, "variables", "these bytes")))
        yield Details(name, tuple(inner))
