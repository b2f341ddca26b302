"""The section "Memory Report" of a page: memory of IPUs, of modules and of tiles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from popdist_py.html_pages.chart_colours import LIGHT
from popdist_py.html_pages.charts import Bars, Line, Mark, bars, lines
from popdist_py.html_pages.page import Chart, Part, Section, Sentence, Table
from popdist_py.html_pages.program_charts import Node, treemap
from popdist_py.ipu.memory_contents import Contribution, IpuMemory
from popdist_py.ipu.page.charted_values import (
    WHOLE_PROGRAM,
    category_style,
    megabytes,
    module_of,
    not_shown,
    percent,
    with_table,
)
from popdist_py.ipu.reports import ExecutionPage, MemoryPage

__all__ = ["memory_section", "tile_bytes_of"]

_MODULE_DEPTH: Final = 2
_MOST_MODULES: Final = 80
_MOST_RECTANGLES: Final = 60
_MOST_LINES: Final = 8
# Grains are small parts of a tensor, and the memory of a tile is shown in KiB as PopVision does.
_KIB: Final = 1024


def memory_section(memory: MemoryPage, execution: ExecutionPage, grain: int) -> Section:
    """Return the section with the memory of IPUs by category and module, and of their tiles.

    ``grain`` is the number of consecutive bytes of a tensor that are stored on the same tile.
    """
    return Section(
        "Memory Report",
        (
            *with_table(*_by_category(memory.ipus)),
            _nested(memory.ipus),
            *_by_module(memory.ipus),
            *with_table(_tiles(memory, grain), _tile_table(memory, execution)),
        ),
    )


def _by_category(ipus: Sequence[IpuMemory]) -> tuple[Chart, Table]:
    sums = [Counter[str](**own.by_category()) for own in ipus]
    total: Counter[str] = Counter()
    for one in sums:
        total.update(one)
    shown = sorted((name for name, size in total.items() if size), key=lambda n: (-total[n], n))
    own = max(ipus, key=lambda ipu: ipu.share)

    parts = ", ".join(
        f"{name} {megabytes(size)} MB" for name, size in list(own.by_category().items())[:3]
    )
    capacity = min(one.capacity for one in ipus)
    chart = bars(
        "Memory of each IPU by category",
        f"IPU {own.ipu} is the fullest: {parts}. The dotted line is the memory of an IPU.",
        [f"IPU {one.ipu}" for one in ipus],
        [Bars(name, [one[name] / 1e6 for one in sums], *category_style(name)) for name in shown],
        unit="MB",
        marks=[Mark(capacity / 1e6, "available", is_left=True)],
    )
    rows = [(name, *(megabytes(one[name]) for one in sums)) for name in shown]
    rows.append(("all", *(megabytes(one.needed) for one in ipus)))
    columns = ("category (MB)", *(f"IPU {one.ipu}" for one in ipus))
    return chart, Table("Memory by category", columns, rows)


def _nested(ipus: Sequence[IpuMemory]) -> Part:
    """Return a treemap of IPUs, categories and modules."""
    needed = sum(own.needed for own in ipus)
    nodes = [Node("all", "", "all IPUs", needed, _text(needed), LIGHT["ground"])]
    for own in ipus:
        ipu = f"ipu {own.ipu}"
        text = _text(own.needed)
        nodes.append(Node(ipu, "all", f"IPU {own.ipu}", own.needed, text, LIGHT["ground"]))
        for category, size in own.by_category().items():
            if not size:
                continue
            key, style = f"{ipu} {category}", category_style(category)
            nodes.append(Node(key, ipu, category, size, _text(size), *style))
            modules = _module_bytes(p for p in own.contributions if p.category == category)
            for name, part in modules.most_common(max(4, _MOST_RECTANGLES // len(ipus))):
                if part and len(modules) > 1:
                    nodes.append(Node(f"{key} {name}", key, name, part, _text(part), *style))
    return treemap(
        "Memory by category and module",
        "The area of a rectangle is its memory. A click enlarges a rectangle. The table below has "
        "the figures.",
        nodes,
    )


def _text(size: int) -> str:
    return f"{megabytes(size)} MB"


def _module_bytes(parts: Iterator[Contribution]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums[module_of(part, _MODULE_DEPTH)] += part.bytes
    return sums


def _by_module(ipus: Sequence[IpuMemory]) -> Iterator[Part]:
    found: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for own in ipus:
        for part in own.contributions:
            found[own.ipu, module_of(part, _MODULE_DEPTH)][part.category] += part.bytes
    total: Counter[str] = Counter()
    for sums in found.values():
        total.update(sums)
    ordered_total = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    categories = [name for name, size in ordered_total if size and name not in WHOLE_PROGRAM]
    capacity = {own.ipu: own.capacity for own in ipus}
    ordered = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    rows = []
    for (ipu, module), sums in ordered[:_MOST_MODULES]:
        size = sums.total()
        shared = sum(sums[name] for name in WHOLE_PROGRAM)
        parts = [*(sums[name] for name in categories), shared]
        texts = (megabytes(part) if part else "-" for part in parts)
        rows.append((module, str(ipu), megabytes(size), percent(size / capacity[ipu]), *texts))
    columns = ("module", "IPU", "MB", "of the IPU", *categories, "code, gaps")
    yield Table("Memory of modules", columns, rows, is_sortable=True)
    left_out = [sums.total() for _, sums in ordered[_MOST_MODULES:]]
    if left_out:
        yield Sentence(not_shown(left_out, total.total(), "modules", "the memory"))


# --- tiles --------------------------------------------------------------------------------------


def tile_bytes_of(own: IpuMemory, grain: int) -> list[int]:
    """Return the used bytes of each tile of an IPU, from the tile that begins every tensor on.

    The model of memory stores the first grain (small part) of every tensor on the same tile.
    """
    everywhere, changes = 0, [0] * (own.tiles + 1)
    for part in own.contributions:
        whole, rest = divmod(-(-part.bytes // grain), own.tiles)
        everywhere += whole
        changes[0] += 1
        changes[rest] -= 1
    return [grain * (everywhere + more) for more in accumulate(changes[: own.tiles])]


def _tiles(memory: MemoryPage, grain: int) -> Chart:
    ordered = sorted(memory.ipus, key=lambda own: -own.share)[:_MOST_LINES]
    fullest = ordered[0]
    series = [
        Line(
            name=f"IPU {own.ipu}",
            xs=range(own.tiles),
            ys=[size / _KIB for size in tile_bytes_of(own, grain)],
            index=own.ipu,
        )
        for own in sorted(ordered, key=lambda own: own.ipu)
    ]
    summary = (
        f"The fullest tile of IPU {fullest.ipu} has {fullest.fullest_tile / _KIB:,.0f} KiB, its "
        f"tiles {fullest.per_tile / _KIB:,.0f} KiB on average. Tiles are ordered as the model of "
        "memory fills them."
    )
    if len(memory.ipus) > len(series):
        summary += f" The {len(series)} fullest of {len(memory.ipus)} IPUs are drawn."
    limit = Mark(memory.tile_bytes / _KIB, "memory of a tile", of_y=True)
    return lines("Memory of each tile", summary, series, x="tile", y="KiB", marks=[limit],
                 from_zero=True)  # fmt: skip


def _tile_table(memory: MemoryPage, execution: ExecutionPage) -> Table:
    columns = (
        *("IPU", "tiles", "mean bytes of a tile", "fullest tile", "of a tile's memory"),
        *("fullest over mean", "tile balance of the work"),
    )
    rows = [
        (
            str(own.ipu),
            f"{own.tiles:,}",
            f"{own.per_tile:,}",
            f"{max(own.fullest_tile, own.fullest_io_tile):,}",
            percent(own.share),
            f"{own.fullest_tile / (own.per_tile or 1):.2f}",
            f"{work.tile_balance:.2%}",
        )
        for own, work in zip(memory.ipus, execution.ipus, strict=True)
    ]
    return Table("Tile balance", columns, rows, is_sortable=len(rows) > 1)
