"""Searches for the best batch, stages, recomputation or IPUs, with printable results.

Each search returns an ``Answer``, a result that can be printed and converted to JSON. The search
algorithms are in the module ``searches``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from popdist_py.errors import counted
from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.documents.document import Cell, Column, Document, Section, Share
from popdist_py.ipu.documents.report import Report
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.memory_contents import UNCERTAINTY, Verdict
from popdist_py.ipu.searches.batch import largest_batch
from popdist_py.ipu.searches.checkpoint_sets import RecomputationPoint, recomputation_curve
from popdist_py.ipu.searches.fewest_ipus import MOST_IPUS, Combination, fewest_ipus
from popdist_py.ipu.searches.recomputation import fastest_that_fits
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.searches.splits import best_splits, with_micro_batches

__all__ = [
    "Answer",
    "beginnings",
    "find_batch",
    "find_ipus",
    "find_recomputation",
    "find_splits",
    "first_modules",
]

_VERSION: Final = 1
# The largest number of operations that a sentence names one by one.
_NAMES: Final = 12
# The largest number of points of the curve that the table shows.
_POINTS: Final = 12


@dataclass(frozen=True, slots=True)
class Answer(Report):
    """The result of a search for the best batch, stages, recomputation or number of IPUs.

    Attributes:
        question: The name of the setting that is searched, which is "batch", "splits",
            "recompute" or "ipus".
        sentence: The result of the search, as a sentence for the user.
        json_values: The result of the search, as JSON values for programs. ``json_values`` is empty
            if the search found nothing that fits into memory.
        run: The configuration (graph, placement, settings and IPU) that the search found; None if
            the search found nothing that fits into memory.
        more: Further tables, which are displayed after the table of IPUs.
        curve: The compared kinds of recomputation; empty if the question is not "recompute".
    """

    question: str
    sentence: str
    json_values: Mapping[str, Any]
    run: Run | None
    more: tuple[Section, ...] = ()
    curve: tuple[RecomputationPoint, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether the configuration that the search found fits, or is close to the limit."""
        return "does not fit" if self.run is None else self.run.fullest.verdict

    def document(self) -> Document:
        """Return the headline and table that display the result of the search."""
        if self.run is None:
            return Document(self.sentence, False, ())
        sentence = self.sentence
        if self.verdict == "close":
            share = f"{self.run.fullest.share:.1%} +- {UNCERTAINTY:.0%}"
            sentence += f"\nIt is close to the limit: the fullest tile needs {share} of its memory."
        return Document(sentence, self.verdict == "fits", (_summary(self.run), *self.more))

    def to_json(self) -> dict[str, Any]:
        """Return the result of the search as a dictionary of JSON values."""
        found = self.run is not None
        made = {"version": _VERSION, "question": self.question, "found": found, **self.json_values}
        if self.run is not None:
            made |= {
                "verdict": self.verdict,
                "share": self.run.fullest.share,
                "uncertainty": UNCERTAINTY,
            }
        return made


def find_batch(run: Run) -> Answer:
    """Find the largest micro-batch (number of samples) with which the model fits into memory."""
    batch = largest_batch(run)
    if not batch:
        return Answer("batch", "Not even a micro-batch of one sample fits", {}, None)
    found = replace(run, graph=run.graph.with_batch(batch))
    return Answer("batch", f"The largest micro-batch that fits: {batch:,}", {"batch": batch}, found)


def find_splits(run: Run, ipus: int) -> Answer:
    """Find the division of a model among ``ipus`` IPUs with which a call of the model is fastest.

    If the run has too few micro-batches for the only divisions that are possible, the answer has
    as many micro-batches as they need, and says so.
    """
    found, note = _divided(run, ipus), ""
    if found is None:
        more = with_micro_batches(run, ipus + 1)
        found = None if more is run else _divided(more, ipus)
        note = f", with {more.settings.micro_batches} micro-batches"
    if found is None:
        return Answer("splits", f"No split over {counted(ipus, 'IPU')} fits", {}, None)
    names = first_modules(found.graph, found.placement)
    where = ", ".join(names) or "nowhere: one IPU has room for everything"
    if found.placement.num_stages > found.placement.num_ipus:
        where += f" (on IPU {found.placement.ipus[-1]} again, because it shares a weight)"
    split = _split_option(found)
    values: dict[str, Any] = {"splits": names, "ipus": list(found.placement.ipus), "split": split}
    words = [f"--split {split}"]
    if note:
        values["micro_batches"] = found.settings.micro_batches
        name = "accumulation" if run.settings.is_training else "device-iterations"
        words.append(f"--{name} {found.settings.micro_batches}")
    sentence = f"The best splits over {counted(ipus, 'IPU')}{note}: {where}"
    usage = (Section("To estimate it, instead of --find and --ipus", notes=tuple(words)),)
    return Answer("splits", sentence, values, found, usage if names else ())


def _split_option(run: Run) -> str:
    """Return the value of the command's option ``--split`` that gives a run's division."""
    ipus, words = run.placement.ipus, []
    for stage, name in enumerate(first_modules(run.graph, run.placement), 1):
        is_next = ipus[stage] == max(ipus[:stage]) + 1
        words.append(name if is_next else f"{name}@{ipus[stage]}")
    return ",".join(words)


def _divided(run: Run, ipus: int) -> Run | None:
    placement = best_splits(run, ipus)
    return None if placement is None else replace(run, placement=placement)


def find_recomputation(run: Run) -> Answer:
    """Find the fastest choice of recomputed activations with which the model fits into memory."""
    curve = recomputation_curve(run)
    found = fastest_that_fits(curve)
    values: dict[str, Any] = {"curve": [_of_point(point) for point in curve]}
    if found is None:
        return Answer("recompute", "No recomputation makes it fit", values, None, curve=curve)
    kind, marked = found.run.settings.recompute, list(found.checkpoints)
    sentence = f"The cheapest recomputation that fits: {kind}"
    if marked:
        names = ", ".join(marked) if len(marked) <= _NAMES else found.kept
        sentence += f", with checkpoints behind {len(marked)} operations: {names}"
    values |= {"recompute": kind, "checkpoints": marked}
    return Answer("recompute", sentence, values, found.run, (_curve(curve, found),), curve)


def _of_point(point: RecomputationPoint) -> dict[str, Any]:
    """Return the JSON values of a point of the curve of memory and time."""
    return {
        "recompute": point.run.settings.recompute,
        "checkpoints": list(point.checkpoints),
        "samples_per_second": point.samples_per_second,
        "share": point.share,
        "verdict": point.verdict,
    }


def _curve(curve: Sequence[RecomputationPoint], found: RecomputationPoint) -> Section:
    """Return the table of the curve, around the point that was found."""
    at = curve.index(found)
    first = max(0, min(at - _POINTS // 2, len(curve) - _POINTS))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Share(p.share), f"{p.samples_per_second:,.1f}", p.verdict, p.kept)
        for p in curve[first : first + _POINTS]
    )
    columns = (
        Column("fullest tile"),
        Column("samples/s"),
        Column("then", is_words=True),
        Column("kept for the backward pass", is_words=True, wraps=True),
    )
    note = "The number of operations is in brackets; a star stands for any number in their names."
    return Section("Memory against time", columns, rows, (note,))


def find_ipus(run: Run, most: int | None = None) -> Answer:
    """Find the fewest IPUs on which the model fits, with a division and options of the run.

    Args:
        run: The configuration of the run. The search does not use its division into stages.
        most: The largest number of IPUs of one replica. None stands for 64.
    """
    found = fewest_ipus(run) if most is None else fewest_ipus(run, most)
    if not found:
        sentence = f"No number of IPUs up to {most or MOST_IPUS} fits (powers of two)"
        return Answer("ipus", sentence, {}, None)
    best, *others = found
    made = best.run
    where = f": {beginnings(made)}" if made.placement.num_stages > 1 else ""
    sentence = f"The fewest IPUs on which it fits: {best.ipus}{where}"
    if best.changes:
        sentence += f"\nWith {', '.join(best.changes)}"
    numbers = map(Column, ("IPUs", "samples/s", "fullest tile"))
    columns = (*numbers, Column("then", is_words=True), Column("with", is_words=True))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            str(one.ipus),
            f"{one.samples_per_second:,.1f}",
            Share(one.run.fullest.share),
            one.verdict,
            ", ".join(one.changes) or "the options as given",
        )
        for one in others
    )
    note = "Only powers of two are compared, because PopTorch reserves such numbers of IPUs."
    more = (Section("Alternatives", columns if rows else (), rows, (note,)),)
    values = _of_combination(best) | {"alternatives": [_of_combination(one) for one in others]}
    return Answer("ipus", sentence, values, made, more)


def beginnings(run: Run) -> str:
    """Return a text with the IPU and the first operation of each stage except the first stage."""
    names = first_modules(run.graph, run.placement)
    places = zip(run.placement.ipus[1:], names, strict=True)
    return ", ".join(f"IPU {ipu} from {name}" for ipu, name in places)


def _of_combination(found: Combination) -> dict[str, Any]:
    """Return the JSON values of a combination of a number of IPUs and options."""
    return {
        "num_ipus": found.ipus,
        "splits": first_modules(found.run.graph, found.run.placement),
        "ipus": list(found.run.placement.ipus),
        "changes": list(found.changes),
        "samples_per_second": found.samples_per_second,
        "verdict": found.verdict,
        "share": found.run.fullest.share,
    }


def first_modules(graph: Graph, placement: Placement) -> list[str]:
    """Return the name of the first operation of every pipeline stage except stage 0."""
    stages = range(1, placement.num_stages)
    return [graph.operations[placement.stages.index(stage)].name for stage in stages]


def _summary(run: Run) -> Section:
    report = cycles(run.graph, run.placement, run.settings, run.ipu, run.model)
    memories = memory(run.graph, run.placement, run.settings, run.ipu, run.estimates).ipus
    columns = (*map(Column, ("IPU", "fullest tile", "busy")), Column("begins at", is_words=True))
    names = [run.graph.operations[0].name, *first_modules(run.graph, run.placement)]
    first: dict[int, list[str]] = {}
    for ipu, name in zip(run.placement.ipus, names, strict=True):
        first.setdefault(ipu, []).append(name)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            str(own.ipu),
            Share(max(own.fullest_tile, own.fullest_io_tile) / own.tile_bytes),
            Share(report.busy[own.ipu]),
            ", ".join(first.get(own.ipu, ())),
        )
        for own in memories
    )
    note = f"{report.throughput:,.1f} samples/s, {report.total:,} cycles a call"
    return Section("With it", columns, rows, (note,))
