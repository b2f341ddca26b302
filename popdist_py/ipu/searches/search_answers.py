"""Searches for the best batch, stages or recomputation, with results for printing and as JSON.

Each search returns an ``Answer``, a result that can be printed and converted to JSON. The search
algorithms are in the module ``searches``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from popdist_py.errors import counted
from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.documents.document import Cell, Column, Document, Section, Share
from popdist_py.ipu.documents.report import Report
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.searches.batch import largest_batch
from popdist_py.ipu.searches.recomputation import cheapest_recomputation
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.searches.splits import best_splits

__all__ = ["Answer", "find_batch", "find_recomputation", "find_splits", "first_modules"]

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Answer(Report):
    """The result of a search for the best batch, stages or recomputation.

    Attributes:
        question: The name of the setting that is searched, which is "batch", "splits" or
            "recompute".
        sentence: The result of the search, as a sentence for the user.
        json_values: The result of the search, as JSON values for programs. ``json_values`` is empty
            if the search found nothing that fits into memory.
        run: The configuration (graph, placement, settings and IPU) that the search found; None if
            the search found nothing that fits into memory.
    """

    question: str
    sentence: str
    json_values: Mapping[str, Any]
    run: Run | None

    def document(self) -> Document:
        """Return the headline and table that display the result of the search."""
        sections = () if self.run is None else (_summary(self.run),)
        return Document(self.sentence, self.run is not None, sections)

    def to_json(self) -> dict[str, Any]:
        """Return the result of the search as a dictionary of JSON values."""
        found = self.run is not None
        return {"version": _VERSION, "question": self.question, "found": found, **self.json_values}


def find_batch(run: Run) -> Answer:
    """Find the largest micro-batch (number of samples) with which the model fits into memory."""
    batch = largest_batch(run)
    if not batch:
        return Answer("batch", "Not even a micro-batch of one sample fits", {}, None)
    found = replace(run, graph=run.graph.with_batch(batch))
    return Answer("batch", f"The largest micro-batch that fits: {batch:,}", {"batch": batch}, found)


def find_splits(run: Run, ipus: int) -> Answer:
    """Find the division of a model among ``ipus`` IPUs that makes the slowest IPU fastest."""
    placement = best_splits(run, ipus)
    if placement is None:
        return Answer("splits", f"No split over {counted(ipus, 'IPU')} fits", {}, None)
    names = first_modules(run.graph, placement)
    where = ", ".join(names) or "nowhere: one IPU has room for everything"
    found = replace(run, placement=placement)
    return Answer(
        "splits", f"The best splits over {counted(ipus, 'IPU')}: {where}", {"splits": names}, found
    )


def find_recomputation(run: Run) -> Answer:
    """Find the fastest choice of recomputed activations with which the model fits into memory."""
    found = cheapest_recomputation(run)
    if found is None:
        return Answer("recompute", "No recomputation makes it fit", {}, None)
    kind = found.settings.recompute
    before = {o.name for o in run.graph.operations if o.is_checkpoint}
    marked = [o.name for o in found.graph.operations if o.is_checkpoint and o.name not in before]
    sentence = f"The cheapest recomputation that fits: {kind}"
    if marked:
        sentence += f", with checkpoints behind {len(marked)} operations: {', '.join(marked)}"
    return Answer("recompute", sentence, {"recompute": kind, "checkpoints": marked}, found)


def first_modules(graph: Graph, placement: Placement) -> list[str]:
    """Return the name of the first operation of every pipeline stage except stage 0."""
    stages = range(1, placement.num_stages)
    return [graph.operations[placement.stages.index(stage)].name for stage in stages]


def _summary(run: Run) -> Section:
    report = cycles(run.graph, run.placement, run.settings, run.ipu, run.model)
    memories = memory(run.graph, run.placement, run.settings, run.ipu, run.estimates).ipus
    columns = (*map(Column, ("IPU", "fullest tile", "busy")), Column("begins at", is_words=True))
    first = {0: run.graph.operations[0].name} | {
        run.placement.ipus[stage]: name
        for stage, name in enumerate(first_modules(run.graph, run.placement), 1)
    }
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            str(own.ipu),
            Share(max(own.fullest_tile, own.fullest_io_tile) / own.tile_bytes),
            Share(report.busy[own.ipu]),
            first.get(own.ipu, ""),
        )
        for own in memories
    )
    note = f"{report.throughput:,.1f} samples/s, {report.total:,} cycles a call"
    return Section("With it", columns, rows, (note,))
