"""The conversion of reports to tables of the library rich, which prints them with colours.

The module ``tables`` is imported only when the library rich displays a report, because importing
rich takes longer than making a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from popdist_py.ipu.documents.document import Cell, Course, Document, Section, Share, levels

__all__ = ["rendered"]

_BAR_WIDTH: Final = 10
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


def rendered(document: Document) -> RenderableType:
    """Return a report with tables as an object that the library rich can print."""
    headline = Text(document.headline, style="bold green" if document.is_good else "bold red")
    return Group(headline, *(part for section in document.sections for part in _parts(section)))


def _parts(section: Section) -> Iterator[RenderableType]:
    yield Text(f"\n{section.title}", style="bold")
    if section.columns:
        table = Table(box=None, pad_edge=True, header_style="dim")
        for index, column in enumerate(section.columns):
            table.add_column(
                Text(column.name),
                justify="left" if column.is_words else "right",
                overflow="fold",
                # In a narrow terminal, a line must not break between a bar of a table cell and the
                # bar's percentage.
                no_wrap=any(isinstance(row[index], Share) for row in section.rows),
            )
        for row in section.rows:
            table.add_row(*map(_cell, row))
        yield table
    yield from (Text(f" {line}") for note in section.notes for line in note.split("\n"))


def _cell(cell: Cell) -> RenderableType:
    return Text(cell) if isinstance(cell, str) else _Drawn(cell)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A bar or chart in a table cell, drawn with block characters.

    On a terminal without Unicode, the bar or chart is drawn with ASCII characters.
    """

    cell: Share | Course

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield self._text(options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text(options))

    def _text(self, options: ConsoleOptions) -> Text:
        if options.ascii_only:
            return Text(str(self.cell))
        if isinstance(self.cell, Share):
            return _bar(self.cell)
        drawn = (_BLOCKS[level] for level in levels(self.cell.values, len(_BLOCKS)))
        return Text("".join(drawn), style="cyan", no_wrap=True, overflow="ellipsis")


def _bar(share: Share) -> Text:
    full = min(_BAR_WIDTH, round(share.value * _BAR_WIDTH))
    bar = Text("█" * full, style="red" if share.value > 1 else "cyan")
    bar.append("░" * (_BAR_WIDTH - full), style="dim")
    return bar.append(f" {share!s:>6}", style="default")
