"""The conversion of reports to tables of the library rich, which prints them with colours.

The module ``tables`` is imported only when the library rich displays a report, because importing
rich takes longer than making a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from popdist_py.ipu.documents.document import Cell, Course, Document, Section, Share, levels

__all__ = ["rendered"]

_BAR_WIDTH: Final = 10
# The least width of a column of words, if the other columns would need all of the terminal.
_LEAST_WORDS: Final = 10
# A width that is enough for every table.
_UNLIMITED: Final = 10_000
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


def rendered(document: Document) -> RenderableType:
    """Return a report with tables as an object that the library rich can print."""
    headline = Text(document.headline, style="bold green" if document.is_good else "bold red")
    return Group(headline, *(part for section in document.sections for part in _parts(section)))


def _parts(section: Section) -> Iterator[RenderableType]:
    yield Text(f"\n{section.title}", style="bold")
    if section.columns:
        yield _Table(section)
    yield from (Text(f" {line}") for note in section.notes for line in note.split("\n"))


@dataclass(frozen=True, slots=True)
class _Table:
    """A table that fits into a narrow terminal without lines that break inside of a number.

    In a narrow terminal, the words of titles are below each other. In a very narrow terminal,
    shares have no bars.
    """

    section: Section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        table = self._made()
        if Measurement.get(console, options.update(width=_UNLIMITED), table).maximum <= (
            options.max_width
        ):
            yield table
            return
        for has_bars in (True, False):
            widths = self._widths(has_bars=has_bars)
            least = sum(_LEAST_WORDS if width is None else width for width in widths)
            if least + 2 * len(widths) <= options.max_width:
                yield self._made(widths, has_bars=has_bars)
                return
        yield self._made(has_bars=False)

    def _widths(self, *, has_bars: bool) -> list[int | None]:
        """Return the least width of each column of numbers, and None for columns of words."""
        widths: list[int | None] = []
        for index, column in enumerate(self.section.columns):
            cells = [row[index] for row in self.section.rows]
            if column.is_words or any(isinstance(cell, Course) for cell in cells):
                widths.append(None)
                continue
            lengths = [len(word) for word in column.name.split()]
            for cell in cells:
                drawn = _bar(cell) if has_bars and isinstance(cell, Share) else str(cell)
                lengths.append(len(drawn))
            widths.append(max(lengths))
        return widths

    def _made(self, widths: Sequence[int | None] = (), *, has_bars: bool = True) -> Table:
        table = Table(box=None, pad_edge=True, header_style="dim")
        for index, column in enumerate(self.section.columns):
            table.add_column(
                Text(column.name),
                justify="left" if column.is_words else "right",
                overflow="fold",
                width=widths[index] if widths else None,
                # A line must not break between a bar of a table cell and the bar's percentage.
                no_wrap=any(isinstance(row[index], Share) for row in self.section.rows),
            )
        for row in self.section.rows:
            cells = row if has_bars else [str(c) if isinstance(c, Share) else c for c in row]
            table.add_row(*map(_cell, cells))
        return table


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
