"""The sections "Summary" and "Insights" of a page: target, options, verdict, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from popdist_py.errors import counted
from popdist_py.html_pages.page import (
    Alert,
    Cell,
    Details,
    Fact,
    Facts,
    Part,
    Section,
    Sentence,
    Table,
    TableRow,
)
from popdist_py.ipu.documents.document import Share
from popdist_py.ipu.graph import Graph
from popdist_py.ipu.memory_contents import UNCERTAINTY, IpuMemory, Verdict, share_of
from popdist_py.ipu.page.charted_values import (
    VERDICT_KINDS,
    WHOLE_PROGRAM,
    duration,
    megabytes,
    percent,
)
from popdist_py.ipu.reports import ExecutionPage, MemoryPage
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Location
from popdist_py.ipu.what_if import Advice

__all__ = ["insights_section", "opening_facts", "summary_section", "verdict_cell"]

_LARGEST: Final = 10
# A smaller share of the samples per second is not shown in a colour.
_NOTICEABLE: Final = 0.01


def verdict_cell(verdict: Verdict) -> Cell:
    """Return a table cell with a verdict in its colour."""
    return Cell(verdict, VERDICT_KINDS[verdict])


def opening_facts(run: Run, memory: MemoryPage, execution: ExecutionPage) -> Facts:
    """Return the most important figures of a run, for the top of its page."""
    own = _fullest(memory.ipus)
    report, settings = execution.report, run.settings
    replicas = counted(settings.replicas, "replica")
    where = f"on IPU {own.ipu}"
    if not Share(own.share).is_multiple:
        where = f"± {UNCERTAINTY:.0%}, {where}"
    return Facts(
        [
            Fact("fullest tile", percent(own.share), where),
            Fact("throughput", f"{report.throughput:,.1f}", "samples/s of all replicas"),
            Fact("a call", duration(report.seconds), f"{report.total:,} cycles"),
            Fact("IPUs", str(run.placement.num_ipus * settings.replicas), replicas),
            Fact("micro-batch", f"{run.graph.batch:,}", f"{report.samples:,} samples a call"),
        ]
    )


def summary_section(run: Run, options: Mapping[str, str]) -> Section:
    """Return the section with the target, the model and the options of a run.

    ``options`` are the options that the user gave, with their values.
    """
    ipu = run.ipu
    replica = run.placement.num_ipus
    target = [
        ("target type", f"IPU, {ipu.name} (estimated)"),
        ("IPUs of a replica", str(replica)),
        ("replicas", f"{run.settings.replicas:,}"),
        ("tiles of an IPU", f"{ipu.tiles:,}"),
        ("memory of a tile", f"{ipu.tile_bytes:,} bytes"),
        ("memory of an IPU", f"{megabytes(ipu.memory)} MB"),
        ("memory of a replica", f"{megabytes(ipu.memory * replica)} MB"),
        ("clock frequency", f"{ipu.clock / 1e9:g} GHz"),
    ]
    tables = [
        Table("Target", ("target", "value"), target),
        Table("Graph", ("graph", "value"), list(_graph_rows(run.graph))),
        Table("Execution options", ("option of the run", "value"), list(_option_rows(run))),
    ]
    if options:
        words = [(name, value) for name, value in options.items()]
        tables.append(Table("Given options", ("given option", "value"), words))
    return Section("Summary", (TableRow(tables),))


def _graph_rows(graph: Graph) -> Iterator[tuple[str, str]]:
    trained = sum(weight.elements for weight in graph.weights if weight.is_trained)
    flops = sum(o.product.flops for o in graph.operations if o.product is not None)
    yield "operations", f"{len(graph.operations):,}"
    yield "trained parameters", f"{trained:,}"
    yield "weights and buffers", f"{megabytes(sum(w.bytes for w in graph.weights))} MB"
    yield "types of data", _types([o.output.type for o in graph.operations])
    yield "types of weights", _types([weight.type for weight in graph.weights])
    yield "forward pass of a sample", f"{flops / 1e9:,.2f} GFLOP"


def _types(found: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(found)) or "-"


def _option_rows(run: Run) -> Iterator[tuple[str, str]]:
    settings = run.settings
    yield "mode", "training" if settings.is_training else "inference"
    yield "execution strategy", settings.strategy
    if settings.is_training:
        yield "gradient accumulation", f"{settings.accumulation:,}"
        name, kind = settings.recompute, settings.recompute_for(run.placement)
        yield "recomputation", str(name) if name == kind else f"{name} ({kind})"
        optimizer = settings.optimizer
        yield "optimiser state of a weight", ", ".join(optimizer.state) or "none"
        yield "type of accumulators", optimizer.accumulator
    yield "device iterations", f"{settings.device_iterations:,}"
    proportion = settings.memory_proportion
    several = proportion if isinstance(proportion, tuple) else (proportion,)
    yield "available memory proportion", ", ".join(f"{one:g}" for one in several)
    yield "partials", settings.partials
    yield "I/O tiles", str(settings.io_tiles)
    yield "data", "synthetic" if settings.synthetic_data else "from the host"
    places = {
        "weights": settings.weight_location,
        "accumulators": settings.accumulator_location,
        "optimiser state": settings.optimizer_location,
        "activations": settings.activation_location,
    }
    for kept, location in places.items():
        if location.is_sharded or not location.on_chip:
            yield kept, _location(location)


def _location(location: Location) -> str:
    where = "on the chip" if location.on_chip else "in Streaming Memory"
    return f"{where}, sharded over replicas" if location.is_sharded else where


# --- insights -----------------------------------------------------------------------------------


def insights_section(memory: MemoryPage) -> Section:
    """Return the section that says whether a model fits, what fills its IPUs, and what helps."""
    own = _fullest(memory.ipus)
    parts: list[Part] = [_panel(own), _ipu_table(memory.ipus), *_tips(memory)]
    always = [part for part in own.largest(len(own.contributions)) if part.is_always_live]
    variables = [part for part in always if part.category not in WHOLE_PROGRAM]
    rows = [
        (
            megabytes(part.bytes),
            Cell(percent(part.bytes / own.capacity), share=min(1.0, part.bytes / own.capacity)),
            part.category,
            part.name,
        )
        for part in variables[:_LARGEST]
    ]
    if rows:
        parts.append(Sentence(f"The largest always-live variables of IPU {own.ipu}:"))
        columns = ("MB", "of the IPU", "category", "variable")
        parts.append(Table("Largest always-live variables", columns, rows))
    return Section("Insights", tuple(parts))


def _panel(own: IpuMemory) -> Part:
    figures = (
        f"the fullest tile of IPU {own.ipu} needs {share_of(own.share, '±')} the "
        f"{own.tile_bytes:,} bytes of a tile"
    )
    if own.verdict == "fits":
        return Sentence(f"In memory: {figures}.", "good")
    if own.verdict == "close":
        return Alert(
            f"Close to the limit: {figures}. Whether the model fits depends on how Poplar lays out "
            "the tiles."
        )
    return Alert(f"Out of memory: {figures}.", is_failure=True)


def _ipu_table(ipus: Sequence[IpuMemory]) -> Table:
    columns = (
        *("IPU", "fullest tile", "verdict", "needed MB", "available MB", "always live MB"),
        *("not always live MB", "peak at"),
    )
    rows = [
        (
            str(own.ipu),
            Cell(percent(own.share), share=min(1.0, own.share)),
            verdict_cell(own.verdict),
            megabytes(own.needed),
            megabytes(own.capacity),
            megabytes(own.always_live),
            megabytes(own.not_always_live),
            own.peak_at,
        )
        for own in ipus
    ]
    fullest = max(range(len(ipus)), key=lambda index: ipus[index].share)
    marked = frozenset([fullest]) if len(ipus) > 1 else frozenset()
    return Table("IPUs", columns, rows, marked, is_sortable=len(ipus) > 1)


def _tips(memory: MemoryPage) -> Iterator[Part]:
    problem = memory.problem
    if problem is None:
        return
    if problem.advice:
        yield Sentence(
            "Changes that would help, each alone. The change that costs the least time for each "
            "saved byte comes first:"
        )
        yield _advice_table("Tips", problem.advice)
    # A single change that is enough is in the first table already.
    if len(problem.together) > 1:
        yield Sentence(
            "Changes that together make the model fit. The figures of each are compared with the "
            "run after the changes above it:"
        )
        yield _advice_table("Tips that together make the model fit", problem.together)
    if problem.more_ipus:
        # The text is a number of IPUs, and the operation with which each IPU begins.
        number, _, begins = problem.more_ipus.partition(": ")
        yield Sentence(f"The model also fits on {number}, without other changes.")
        if begins:
            yield Details(f"Where {number} begin", (Sentence(f"{begins}."),))


def _advice_table(name: str, advice: Sequence[Advice]) -> Table:
    rows = [
        (
            Cell(one.change, "words", note=one.how),
            megabytes(one.saved),
            Cell(one.time, _time_kind(one)),
            Cell("fits", "good") if one.fits else "",
        )
        for one in advice
    ]
    how = any(one.how for one in advice)
    return Table(name, ("change, and how" if how else "change", "MB less", "time", "then"), rows)


def _time_kind(advice: Advice) -> str:
    if abs(advice.slower) < _NOTICEABLE:
        return ""
    return "warn" if advice.slower > 0 else "good"


def _fullest(ipus: Sequence[IpuMemory]) -> IpuMemory:
    return max(ipus, key=lambda own: own.share)
