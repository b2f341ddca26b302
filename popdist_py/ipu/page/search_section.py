"""The section "Search" of a page: the result of a search, and the curve of memory against time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from popdist_py.html_pages.charts import Mark
from popdist_py.html_pages.page import Cell, Chart, Part, Section, Sentence, Table
from popdist_py.html_pages.program_charts import Point, PointKind, point_chart
from popdist_py.ipu.documents.document import Column, Share
from popdist_py.ipu.documents.document import Section as DocumentSection
from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.page.charted_values import VERDICT_COLOURS, VERDICT_KINDS, percent
from popdist_py.ipu.searches.checkpoint_sets import RecomputationPoint
from popdist_py.ipu.searches.search_answers import Answer

__all__ = ["search_section"]

_VERDICTS: Final = get_args(Verdict)


def search_section(answer: Answer) -> Section:
    """Return the section with the result of a search."""
    sentences = answer.sentence.split("\n")
    parts: list[Part] = [Sentence(f"{each}.", VERDICT_KINDS[answer.verdict]) for each in sentences]
    if answer.run is None:
        parts.append(Sentence("This page shows the run as it was described."))
    elif answer.verdict == "close":
        parts.append(Sentence("The run is close to the limit, so that it may not fit.", "warn"))
    if len(answer.curve) > 1:
        parts.append(_curve(answer.curve, answer))
    for each in answer.document().sections:
        parts += _table(each)
    return Section("Search", tuple(parts))


def _table(section: DocumentSection) -> Iterator[Part]:
    """Convert a table of a printed report to a table of the page, with its notes as sentences."""
    if section.rows:
        yield Sentence(f"{section.title}:")
        rows = [
            tuple(_cell(cell, column) for cell, column in zip(row, section.columns, strict=True))
            for row in section.rows
        ]
        yield Table(section.title, [column.name for column in section.columns], rows)
    for note in section.notes:
        yield Sentence(note if note.endswith(".") else f"{note}.")


def _cell(value: object, column: Column) -> str | Cell:
    if isinstance(value, Share):
        return Cell(percent(value.value), share=min(1.0, value.value))
    text = str(value)
    if text in VERDICT_KINDS:
        return Cell(text, VERDICT_KINDS[text])
    return Cell(text, "words") if column.is_words else text


def _curve(curve: Sequence[RecomputationPoint], answer: Answer) -> Chart:
    kinds = [
        PointKind(
            verdict,
            VERDICT_COLOURS[verdict],
            [
                Point(each.share * 100, each.samples_per_second, each.kept)
                for each in curve
                if each.verdict == verdict and each.run is not answer.run
            ],
        )
        for verdict in _VERDICTS
    ]
    found = [each for each in curve if each.run is answer.run]
    if found:
        (own,) = found
        point = Point(own.share * 100, own.samples_per_second, own.kept)
        kinds.append(PointKind("found", VERDICT_COLOURS[own.verdict], [point], is_large=True))
    first, last = curve[0], curve[-1]
    return point_chart(
        "Memory against time",
        f"From {percent(last.share)} of the fullest tile at {last.samples_per_second:,.1f} "
        f"samples/s to {percent(first.share)} at {first.samples_per_second:,.1f} samples/s. "
        "Each point is a kind of recomputation or a set of checkpoints.",
        kinds,
        x="% of the fullest tile's memory",
        y="samples/s",
        marks=[Mark(100, "available", is_left=True)],
    )
