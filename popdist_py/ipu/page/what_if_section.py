"""The section "What if" of a page: the same model with other batches, types and numbers of IPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from popdist_py.errors import counted
from popdist_py.html_pages.page import Cell, Details, Part, Section, Sentence, Table
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.page.charted_values import percent
from popdist_py.ipu.page.summary_sections import verdict_cell
from popdist_py.ipu.searches import Run, best_splits
from popdist_py.ipu.searches.division_costs import shared_weights
from popdist_py.ipu.searches.splits import with_micro_batches
from popdist_py.ipu.settings import Recompute

__all__ = ["Alternative", "alternatives", "what_if_section"]

# The number of operations of all estimated alternatives together. An estimate takes about 60
# microseconds for each operation, so that all estimates take about 2.4 seconds.
_MOST_OPERATIONS: Final = 40_000
_LEAST_ALTERNATIVES: Final = 16
_MOST_ALTERNATIVES: Final = 120
# With more IPUs, a search takes seconds if no division into stages fits.
_MOST_IPUS: Final = 32
_MANY_IPUS: Final = 16
_HALF: Final = "16.16"
_BITS: Final = {"float32": "32", "float16": "16"}
_ORDER: Final[tuple[Verdict, ...]] = ("fits", "close", "does not fit")
_EXPLAINED: Final[Mapping[str, str]] = {
    "norm": "With norm, the backward pass computes normalisations again.",
    "stage": (
        "With stage, the backward pass computes everything again but the inputs of a stage and "
        "checkpoints."
    ),
    "standard": (
        "With standard, the backward pass computes everything again but the checkpoints that "
        "PopART chooses."
    ),
}


@dataclass(frozen=True, slots=True)
class Alternative:
    """The estimate for a run in which some options are changed.

    Attributes:
        run: The configuration with the changed options.
        precision: The bits of the types of data and of weights, such as ``16.32``.
        num_changes: The number of options that differ from the run that the user described.
        share: The used share of the fullest tile.
        verdict: Whether the model fits into memory.
        throughput: The samples per second of all replicas.
    """

    run: Run
    precision: str
    num_changes: int
    share: float
    verdict: Verdict
    throughput: float

    @property
    def recompute(self) -> str:
        """The kind of recomputation of the run."""
        return self.run.settings.recompute_for(self.run.placement)


def alternatives(run: Run) -> list[Alternative]:
    """Estimate a run with other batches, types, recomputations and numbers of IPUs.

    The alternatives that fit come first, and of these the fastest. A large model has fewer
    alternatives, so that the estimates take a few seconds at most: the ones with the fewest changes
    are estimated.
    """
    limit = _MOST_OPERATIONS // max(1, len(run.graph.operations))
    limit = min(_MOST_ALTERNATIVES, max(_LEAST_ALTERNATIVES, limit))
    chosen = sorted(_changed(run), key=lambda each: each[0])[:limit]
    return sorted((_estimated(*each) for each in chosen), key=_rank)


def _rank(one: Alternative) -> tuple[object, ...]:
    """Return a key that sorts by verdict and speed, and alternatives of equal speed by options."""
    speed = round(one.throughput, 1)
    return _ORDER.index(one.verdict), -speed, *_size(one), one.precision, one.recompute


def _estimated(num_changes: int, precision: str, run: Run) -> Alternative:
    fullest = run.fullest
    return Alternative(run, precision, num_changes, fullest.share, fullest.verdict, run.throughput)


def _changed(run: Run) -> Iterator[tuple[int, str, Run]]:
    """Yield the number of changes, the precision and the configuration of every alternative."""
    graphs = _graphs(run.graph)
    kinds: list[Recompute] = [run.settings.recompute_for(run.placement)]
    if run.settings.is_training:
        others: tuple[Recompute, ...] = ("none", "standard", "stage")
        kinds += [kind for kind in others if kind not in kinds]
    own = run.graph.batch
    batches = list(dict.fromkeys([own, max(1, own // 2), 2 * own]))
    choices = product(
        enumerate(_placements(run)), enumerate(graphs), enumerate(kinds), enumerate(batches)
    )
    for (p, placement), (g, (precision, graph)), (k, kind), (b, batch) in choices:
        changes = sum(map(bool, (p, g, k, b)))
        # The first alternative is the run itself, whose kind of recomputation may be "default". For
        # another number of IPUs, "default" may stand for another kind.
        settings = run.settings if not k and not p else replace(run.settings, recompute=kind)
        other = Run(graph.with_batch(batch), placement, settings, run.ipu, run.estimates, run.model)
        yield changes, precision, with_micro_batches(other, placement.num_stages)


def _graphs(graph: Graph) -> list[tuple[str, Graph]]:
    """Return the graph with its own types and in half precision, with their names."""
    data = {_BITS.get(o.output.type) for o in graph.operations} - {None}
    weights = {_BITS.get(weight.type) for weight in graph.weights} - {None}
    own = ".".join("/".join(sorted(map(str, kinds))) or "-" for kinds in (data, weights))
    found = [(own, graph)]
    if "32" in data | weights:
        found.append((_HALF, graph.cast(data="float16", weights="float16")))
    return found


def _other_counts(run: Run) -> list[int]:
    """Return the other numbers of IPUs to estimate, with the number nearest to the run's first."""
    if not run.settings.is_pipelined:
        return []
    own = run.placement.num_ipus
    most = min(_MOST_IPUS, len(run.graph.operations))
    counts = dict.fromkeys([2 * own, own // 2, 1, *([4 * own] if 4 * own <= _MANY_IPUS else [])])
    return [count for count in counts if 0 < count <= most and count != own]


def _placements(run: Run) -> list[Placement]:
    """Return the placement of a run, and good placements for other numbers of IPUs.

    A search for the best placements would take longer than the rest of the page. If no division
    into stages fits with the types of the run, one for half precision is returned.
    """
    found = [run.placement]
    returns = bool(shared_weights(run.graph))
    for count in _other_counts(run):
        # If the last stage returns to an IPU because of a shared weight, there is one stage more.
        stages = count + 1 if count > 1 and returns else count
        for _, graph in _graphs(run.graph):
            other = with_micro_batches(replace(run, graph=graph), stages)
            placement = best_splits(other, count, tries_all=False, is_quick=True)
            if placement is not None:
                found.append(placement)
                break
        else:
            if count == 1:
                found.append(Placement((0,) * len(run.graph.operations), (0,)))
    return found


def what_if_section(run: Run) -> Section:
    """Return the section that compares a run with alternatives."""
    found = alternatives(run)
    fitting = sum(one.verdict == "fits" for one in found)
    parts: list[Part] = [
        Sentence(
            f"{fitting} of {counted(len(found), 'alternative')} fit. IPUs are those of a replica. "
            "A pipeline on more IPUs has the micro-batches that it needs; all other options stay "
            "as they are."
        ),
        Sentence(_key(found)),
        _grid(found),
        Details("What if: all figures", (_table(found),)),
    ]
    counts = {one.run.placement.num_ipus for one in found}
    missing = sorted(count for count in _other_counts(run) if count not in counts)
    if missing:
        numbers = " or ".join(map(str, missing))
        parts.append(Sentence(f"No division of the model over {numbers} IPUs was found to fit."))
    splits = _split_rows(found)
    if splits:
        parts.append(
            Sentence(
                "The stages after the first begin at these operations. For other numbers of IPUs "
                "than those of this run, --find splits may find faster divisions."
            )
        )
        parts.append(Table("Splits", ("IPUs", "stages begin at"), splits))
    return Section("What if", tuple(parts))


def _key(found: Sequence[Alternative]) -> str:
    """Return sentences that explain the cells and the columns of the grid."""
    text = (
        "A cell has the samples per second of all replicas, and the used share of the fullest "
        "tile. The outlined cells are the fastest ones that fit, for each number of IPUs."
    )
    text += " A column names the bits of data and of weights"
    is_training = any(one.run.settings.is_training for one in found)
    text += ", and the kind of recomputation." if is_training else "."
    kinds = dict.fromkeys(one.recompute for one in found)
    texts = [text, *(_EXPLAINED[kind] for kind in kinds if kind in _EXPLAINED)]
    return " ".join(texts)


def _grid(found: Sequence[Alternative]) -> Table:
    """Return a table with a row for each batch and number of IPUs, and a column for each type."""
    columns = sorted({_column(one) for one in found}, key=_column_order)
    at = {(_size(one), _column(one)): one for one in found}
    best: dict[int, Alternative] = {}
    for one in found:
        if one.verdict == "fits":
            best.setdefault(one.run.placement.num_ipus, one)
    rows = [
        (
            str(ipus),
            f"{batch:,}",
            *(_grid_cell(at.get(((ipus, batch), column)), best.get(ipus)) for column in columns),
        )
        for ipus, batch in sorted({_size(one) for one in found})
    ]
    return Table("What if", ("IPUs", "micro-batch", *map(", ".join, columns)), rows)


def _size(one: Alternative) -> tuple[int, int]:
    return one.run.placement.num_ipus, one.run.graph.batch


def _column(one: Alternative) -> tuple[str, ...]:
    if not one.run.settings.is_training:
        return (one.precision,)
    return one.precision, "keeps all" if one.recompute == "none" else one.recompute


def _column_order(column: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Return a key that sorts columns by precision, with half precision last."""
    return column[0] == _HALF, column


def _grid_cell(one: Alternative | None, best: Alternative | None) -> str | Cell:
    if one is None:
        return Cell("-", note="not estimated")
    own = "" if one.num_changes else "this run: "
    note = f"{own}{one.verdict}, {percent(one.share)}"
    kind = f"{verdict_cell(one.verdict).kind}-cell"
    return Cell(f"{one.throughput:,.1f}/s", kind, note=note, is_outlined=one is best)


def _table(found: Sequence[Alternative]) -> Table:
    rows = [
        (
            str(one.run.placement.num_ipus),
            f"{one.run.graph.batch:,}",
            one.precision,
            one.recompute,
            f"{one.run.settings.accumulation:,}",
            Cell(percent(one.share), share=min(1.0, one.share)),
            verdict_cell(one.verdict),
            f"{one.throughput:,.1f}",
            f"{one.throughput / _num_ipus(one.run):,.1f}",
        )
        for one in found
    ]
    columns = (
        *("IPUs", "micro-batch", "precision", "recomputation", "accumulation"),
        *("fullest tile", "verdict", "samples/s", "samples/s of an IPU"),
    )
    marked = frozenset(index for index, one in enumerate(found) if not one.num_changes)
    return Table("What if: all figures", columns, rows, marked, is_sortable=True)


def _num_ipus(run: Run) -> int:
    return run.placement.num_ipus * run.settings.replicas


def _split_rows(found: list[Alternative]) -> list[tuple[str, Cell]]:
    placements = {one.run.placement.num_ipus: one.run for one in found}
    rows = []
    for count, run in sorted(placements.items()):
        stages = range(1, run.placement.num_stages)
        starts = [run.placement.stages.index(stage) for stage in stages]
        if starts:
            names = ", ".join(run.graph.operations[at].name for at in starts)
            rows.append((str(count), Cell(names, "words")))
    return rows
