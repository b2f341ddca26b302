"""Colours of memory categories and IPU activities, texts of amounts, and tables behind charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from popdist_py.html_pages.chart_colours import LIGHT, NEUTRAL, series_colour
from popdist_py.html_pages.page import Chart, Details, Part, Table
from popdist_py.ipu.documents.document import Share
from popdist_py.ipu.memory_contents import Contribution, Verdict

__all__ = [
    "ACTIVITY_STYLES",
    "ACTIVITY_TITLES",
    "VERDICT_COLOURS",
    "VERDICT_KINDS",
    "WHOLE_PROGRAM",
    "category_style",
    "duration",
    "megabytes",
    "module_of",
    "not_shown",
    "percent",
    "with_table",
]

# The colour of each category of memory on light pages, and whether its areas are hatched.
_CATEGORY_STYLES: Final = {
    "weights": (series_colour(0), False),
    "accumulators": (series_colour(0), True),
    "optimiser state": (series_colour(5), False),
    "stash": (series_colour(4), False),
    "activations": (series_colour(1), False),
    "gradients": (series_colour(2), False),
    "working set": (series_colour(3), False),
    "code": (NEUTRAL, False),
    "profiling": (NEUTRAL, True),
    "streams": (series_colour(4), True),
    "gaps": (LIGHT["axis"], False),
}
# The colour of each activity of an IPU on light pages, and whether its bars are hatched.
ACTIVITY_STYLES: Final = {
    "transfer": (series_colour(0), False),
    "load": (series_colour(0), True),
    "forward": (series_colour(2), False),
    "recompute": (series_colour(4), False),
    "backward": (series_colour(1), False),
    "reduce": (series_colour(3), False),
    "update": (series_colour(5), False),
    "host": (NEUTRAL, False),
    "idle": (LIGHT["grid"], False),
}
# The name of each activity of an IPU.
ACTIVITY_TITLES: Final = {
    "transfer": "from the host",
    "load": "Streaming Memory",
    "forward": "forward",
    "recompute": "recomputation",
    "backward": "backward",
    "reduce": "all-reduce",
    "update": "weight update",
    "host": "host calls",
    "idle": "idle and copies",
}
# The categories of memory that belong to the whole program instead of a module.
WHOLE_PROGRAM: Final = ("code", "profiling", "gaps")
# The colour of texts for each verdict.
VERDICT_KINDS: Final[Mapping[str, str]] = {"fits": "good", "close": "warn", "does not fit": "bad"}
# The colour of points for each verdict on light pages.
VERDICT_COLOURS: Final[Mapping[Verdict, str]] = {
    "fits": series_colour(2),
    "close": series_colour(1),
    "does not fit": NEUTRAL,
}


def category_style(category: str) -> tuple[str, bool]:
    """Return the colour of a category on light pages, and whether its areas are hatched."""
    return _CATEGORY_STYLES.get(category, (series_colour(2), True))


def megabytes(size: float) -> str:
    """Return an amount of memory in MB of a million bytes, without the unit: ``1,234.5``."""
    return "<0.1" if 0 < size < 50_000 else f"{size / 1e6:,.1f}"


def duration(seconds: float) -> str:
    """Return a duration in milliseconds; from ten seconds on, in seconds: ``1,133.1 s``."""
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def percent(share: float) -> str:
    """Return a share of a whole as ``70.7%``, or as a multiple if it is large: ``450 times``."""
    return str(Share(share))


def module_of(part: Contribution, depth: int) -> str:
    """Return the module to which a contribution to the used memory belongs.

    The name of a module is cut off after ``depth`` parts. Code and gaps belong to the whole
    program.
    """
    if part.category in WHOLE_PROGRAM:
        return "the whole program"
    # The name of a contribution is the name of a weight (``fc.weight``), of an operation, of one of
    # its passes (``conv1 (backward)``), or of a recomputed output (``conv1:out again``).
    name = part.name.partition(" (")[0].partition(":")[0]
    if part.category in ("weights", "accumulators", "optimiser state") and "." in name:
        name = name.rpartition(".")[0]
    return ".".join(name.split(".")[:depth])


def with_table(chart: Chart, table: Table) -> Iterator[Part]:
    """Yield a chart, and a table with the same figures that the reader can open."""
    yield chart
    yield Details(f"{chart.title}: the figures", (table,))


def not_shown(left_out: Sequence[float], total: float, noun: str, whole: str) -> str:
    """Return a sentence that says how many rows a table leaves out, and their share of the whole.

    Args:
        left_out: The values of the rows that the table does not show.
        total: The sum of the values of all rows.
        noun: The plural of the word for a row, such as ``operations``.
        whole: The quantity that the values add up to, such as ``the cycles``.
    """
    share = sum(left_out) / total if total else 0.0
    return f"Not shown: {len(left_out):,} more {noun} with {percent(share)} of {whole}."
