"""The sections "Operations" and "Execution Trace" of a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from popdist_py.html_pages.charts import Bars, bars
from popdist_py.html_pages.page import Cell, Code, Details, Part, Section, Sentence, Table
from popdist_py.html_pages.program_charts import Lane, Span, lanes
from popdist_py.ipu.accumulation_window import Piece
from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.page.charted_values import (
    ACTIVITY_STYLES,
    ACTIVITY_TITLES,
    megabytes,
    not_shown,
    percent,
    with_table,
)
from popdist_py.ipu.reports import ExecutionPage
from popdist_py.ipu.schedule import least_accumulation
from popdist_py.ipu.schedule_views import grid
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.stage_cycles import operation_cycles

__all__ = ["execution_section", "operations_section", "time_by_kind"]

_MOST_OPERATIONS: Final = 150
# A chart with more activities would make the page slow to scroll.
_MOST_MICRO_BATCHES: Final = 16
_MOST_LANES: Final = 16


# --- operations ---------------------------------------------------------------------------------


def operations_section(run: Run) -> Section:
    """Return the section with the cycles, flops and memory of each operation, largest first."""
    graph, placement = run.graph, run.placement
    is_training = run.settings.is_training
    passes = operation_cycles(graph, placement, run.settings, run.ipu, run.model)
    found = sorted(
        zip(graph.operations, placement.stages, *passes, strict=True),
        key=lambda row: (-(row[2] + row[3]), row[0].name),
    )
    total = sum(map(sum, passes)) or 1.0
    longest = max((row[2] + row[3] for row in found), default=0.0) or 1.0
    peak = run.ipu.product_rate("float16", "float16")
    rows: list[tuple[str | Cell, ...]] = []
    for operation, stage, forward, backward in found[:_MOST_OPERATIONS]:
        flops = operation.product.flops * graph.batch if operation.product else 0
        weights = sum(graph.weight_of[name].bytes for name in operation.weights)
        rows.append(
            (
                operation.name,
                operation.kind,
                str(placement.ipus[stage]),
                f"{forward:,.0f}",
                *([f"{backward:,.0f}"] if is_training else []),
                Cell(percent((forward + backward) / total), share=(forward + backward) / longest),
                f"{flops / 1e9:,.2f}" if flops else "-",
                percent(flops / forward / peak) if flops and forward else "-",
                megabytes(weights),
                megabytes(graph.bytes_of(operation.output.name)),
            )
        )
    columns = (
        *("operation", "kind", "IPU", "forward cycles"),
        *(["backward cycles"] if is_training else []),
        "of all cycles",
        *("forward GFLOP", "of the fp16 peak", "weights MB", "output MB"),
    )
    what = "Cycles, flops and output are those of one micro-batch."
    if is_training:
        what += " Recomputation and the weight update are not included."
    parts: list[Part] = [
        Sentence(f"{what} Click the title of a column to sort by it."),
        Table("Operations", columns, rows, is_sortable=True),
    ]
    left_out = [forward + backward for _, _, forward, backward in found[_MOST_OPERATIONS:]]
    if left_out:
        parts.append(Sentence(not_shown(left_out, total, "operations", "the cycles")))
    return Section("Operations", tuple(parts))


# --- execution trace ----------------------------------------------------------------------------


def execution_section(run: Run, execution: ExecutionPage) -> Section:
    """Return the section with the time of each IPU by kind, and the activities of one window."""
    return Section(
        "Execution Trace",
        (
            *_times(execution),
            *_window(run, execution.report.window),
            Details("First steps of the schedule", (Code(_first_steps(execution)),)),
            _traffic(run, execution),
        ),
    )


def time_by_kind(execution: ExecutionPage) -> list[dict[str, float]]:
    """Return, for each IPU, the clock cycles of one call by kind of activity.

    The kind "host" is the time that each call needs beside its micro-batches and weight updates.
    The kind "idle" is the rest of the call: waiting for other IPUs, copies between IPUs, and
    synchronisation.
    """
    settings, report = execution.settings, execution.report
    updates = settings.device_iterations if settings.is_training else 0
    sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in execution.ipus]
    for stage, ipu in zip(report.stages, execution.stage_ipus, strict=True):
        for name, each in (
            ("transfer", 0.0 if settings.overlaps_io else stage.receive),
            ("load", stage.load if settings.is_phased else stage.offload),
            ("forward", stage.forward),
            ("recompute", stage.recompute),
            ("backward", stage.backward),
        ):
            sums[ipu][name] += settings.micro_batches * each
        sums[ipu]["reduce"] += updates * stage.all_reduce
        sums[ipu]["update"] += updates * stage.update
    for own in sums:
        own["host"] = report.call
        own["idle"] = max(0.0, report.total - sum(own.values()))
    return [dict(own) for own in sums]


def _imbalance(execution: ExecutionPage) -> str:
    if len(execution.report.stages) == 1:
        return ""
    return f" The slowest stage takes {execution.imbalance:.2f} times the mean of all stages."


def _times(execution: ExecutionPage) -> Iterator[Part]:
    times = time_by_kind(execution)
    total = execution.report.total or 1
    shown = [name for name in ACTIVITY_STYLES if any(round(own.get(name, 0)) for own in times)]
    busiest = max(execution.ipus, key=lambda own: own.busy)
    chart = bars(
        "Time of each IPU in a call",
        f"IPU {busiest.ipu} computes {percent(busiest.busy)} of a call of "
        f"{execution.report.total:,} cycles.{_imbalance(execution)}",
        [f"IPU {own.ipu}" for own in execution.ipus],
        [
            Bars(ACTIVITY_TITLES[name], [own.get(name, 0) / total * 100 for own in times],
                 *ACTIVITY_STYLES[name])
            for name in shown
        ],
        unit="% of a call",
    )  # fmt: skip
    chart.figure["layout"]["xaxis"]["range"] = [0, 100]
    rows = [
        (str(ipu), *(f"{own.get(name, 0):,.0f}" for name in shown)) for ipu, own in enumerate(times)
    ]
    columns = ("IPU (cycles)", *(ACTIVITY_TITLES[name] for name in shown))
    yield from with_table(chart, Table("Cycles of a call by kind", columns, rows))


@dataclass(frozen=True, slots=True)
class _Excerpt:
    """The activities of a window, of which only the first micro-batches may be computed."""

    pieces: Sequence[Piece]
    micro_batches: int


def _excerpt(run: Run) -> _Excerpt:
    settings = run.settings.one_window
    least = 1
    if settings.is_pipelined:
        stages = run.placement.num_stages
        least = least_accumulation(stages, is_training=settings.is_training)
    count = min(settings.micro_batches, max(least + 2, _MOST_MICRO_BATCHES))
    settings = _with_micro_batches(settings, count)
    _, window = cycles_and_window(run.graph, run.placement, settings, run.ipu, run.model)
    return _Excerpt(window.pieces(), count)


def _with_micro_batches(settings: Settings, count: int) -> Settings:
    if settings.is_training:
        return replace(settings, accumulation=count)
    return replace(settings, device_iterations=count, output_return_period=1)


def _window(run: Run, cycles: int) -> Iterator[Part]:
    excerpt = _excerpt(run)
    number = run.placement.num_ipus
    rows = [f"IPU {ipu}" for ipu in range(min(number, _MOST_LANES))]
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for piece in excerpt.pieces:
        if piece.ipu < len(rows):
            text = [ACTIVITY_TITLES[piece.name]]
            if piece.micro_batch is not None:
                text.append(f"micro-batch {piece.micro_batch}")
            if piece.stage is not None:
                text.append(f"stage {piece.stage}")
            begin, length = piece.begin / 1e6, (piece.end - piece.begin) / 1e6
            spans[piece.name].append(Span(rows[piece.ipu], begin, length, ", ".join(text)))
    own = run.settings.one_window.micro_batches
    what = "All micro-batches of a call"
    if run.settings.is_training:
        what = "From one weight update to the next"
    summary = f"{what}: {cycles:,} cycles. Gaps are waiting, copies and synchronisation."
    if excerpt.micro_batches < own:
        summary += (
            f" Drawn with {excerpt.micro_batches} of {own:,} micro-batches; the others repeat the "
            "middle."
        )
    if len(rows) < number:
        summary += f" The first {len(rows)} of {number} IPUs are drawn."
    drawn = [
        Lane(ACTIVITY_TITLES[name], colour, spans[name], is_hatched)
        for name, (colour, is_hatched) in ACTIVITY_STYLES.items()
        if spans[name]
    ]
    yield lanes("Activities of each IPU", summary, rows, drawn, unit="million cycles")


def _first_steps(execution: ExecutionPage) -> str:
    key = "F forward, R recomputation, B backward, U update, E exchange, with its micro-batch"
    return f"{grid(execution.beginning)}\n{key}"


def _traffic(run: Run, execution: ExecutionPage) -> Table:
    """Return the table of the work of each IPU, and of the operations with which it begins."""
    begins: defaultdict[int, list[str]] = defaultdict(list)
    for stage, ipu in enumerate(run.placement.ipus):
        begins[ipu].append(run.graph.operations[run.placement.stages.index(stage)].name)
    columns = (
        *("IPU", "busy", "tile balance", "from the host MB", "to the host MB"),
        *("to other IPUs MB", "begins at"),
    )
    rows: list[tuple[str | Cell, ...]] = [
        (
            str(own.ipu),
            Cell(percent(own.busy), share=own.busy),
            f"{own.tile_balance:.2%}",
            *(f"{size / 1e6:,.3f}" for size in (own.received, own.sent, own.copied)),
            Cell(", ".join(begins[own.ipu]), "words"),
        )
        for own in execution.ipus
    ]
    return Table("Work and transfers of a call", columns, rows, is_sortable=len(rows) > 1)
