"""Whole HTML pages and fragments for notebooks, rendered from parts with Jinja2.

A page is one file that works without a network. The content security policy of a page blocks every
request, and every script except those that draw the charts and sort the tables. All text in the
parts of a page is escaped.

Jinja2 is imported when the first page is rendered. The parts of a page are named tuples, because
defining dataclasses would take half of the time in which the page of a short job is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import jinja2

_FOLDER: Final = Path(__file__).parent
# A table cell counts as a number if it is empty, or contains a hyphen or a number (with or without
# a unit).
# A number with its unit, a range such as 3-5, a limit such as <0.1, or a number that a mark makes
# doubtful, such as 98%*.
_NUMBER: Final = re.compile(
    r"<?[-+]?[\d.,]+(-[\d.,]+)?( ?(%|x|[kMG]?i?B|ms|s|min|h|us|W))?[* ]?|-|"
)
# Characters that XML forbids or browsers do not show. A regular expression of the allowed
# characters would take ten times as long to compile.
_UNSHOWABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_PAGE_TEMPLATE: Final = "page.html.jinja"
# The style that hides the place of a chart, so that only its title and its summary are shown.
_NO_CHARTS: Final = ".pp-plot{display:none}"
_WITHOUT_PLOTLY: Final = (
    "The charts are left out: they need the package plotly, which is not installed. "
    "Install the package (pip install plotly), then make this page again."
)
_PLOTLY_FILE: Final = "package_data/plotly.min.js"
# Compression at level 4 takes half of the time of gzip's default level, and the result is hardly
# larger.
_COMPRESSION_LEVEL: Final = 4


# --- parts --------------------------------------------------------------------------------------


class Sentence(NamedTuple):
    """A paragraph; ``kind`` selects its colour: ``good``, ``bad``, ``warn`` or empty."""

    text: str
    kind: str = ""


class Links(NamedTuple):
    """Links to files, in a paragraph or a table cell; link addresses are relative to the page."""

    links: Sequence[tuple[str, str]]
    lead: str = ""


class Alert(NamedTuple):
    """A highlighted warning, which is red if ``is_failure``."""

    text: str
    is_failure: bool = False


class Fact(NamedTuple):
    """An important value in large type, with its name and a short note."""

    name: str
    value: str
    note: str = ""


class Facts(NamedTuple):
    """Facts, shown side by side."""

    facts: Sequence[Fact]


class Cell(NamedTuple):
    """A table cell with a colour, with a bar that is filled in part, or with a second line.

    Attributes:
        text: The value of the cell.
        kind: The colour of the text (``good``, ``bad`` or ``warn``) or of the whole cell
            (``good-cell``, ``bad-cell`` or ``warn-cell``). The lines of a cell of the kind
            ``words`` are broken.
        share: The filled part of the bar, from 0 to 1; None draws no bar.
        note: A second line in small type.
        is_outlined: Whether the cell stands out among its neighbours.
    """

    text: str
    kind: str = ""
    share: float | None = None
    note: str = ""
    is_outlined: bool = False


class Table(NamedTuple):
    """A table; ``name`` is for screen readers, and the rows with the indices ``marked`` stand out.

    If a row has fewer cells than columns, its last cell spans the remaining columns. If a table
    ``is_sortable``, a click on the title of a column sorts the rows of the table.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Links | Cell]]
    marked: frozenset[int] = frozenset()
    is_sortable: bool = False

    def number_columns(self) -> frozenset[int]:
        """Return the indices of the columns that contain only numbers; they are aligned right."""
        rows = [row for row in self.rows if len(row) == len(self.columns)]
        columns = range(len(self.columns))
        return frozenset(n for n in columns if all(_is_number(row[n]) for row in rows))


class Code(NamedTuple):
    """Commands, output or a traceback in a fixed-width font."""

    text: str


class InlineSvgs(NamedTuple):
    """SVG pictures made by this package, side by side inside the page.

    Every CSS selector in ``style`` begins with ``.poprun-py``, the class of pages and fragments, so
    that the rules do not affect the rest of a notebook.
    """

    svgs: Sequence[str]
    style: str


class SvgImage(NamedTuple):
    """An SVG picture not made by this package, embedded so that its scripts cannot run."""

    svg: str
    name: str

    def address(self) -> str:
        """Return the picture as a ``data:`` address."""
        import base64

        encoded = base64.b64encode(self.svg.encode("utf-8", "replace")).decode()
        return f"data:image/svg+xml;base64,{encoded}"


class Chart(NamedTuple):
    """A chart made by ``charts.py``, which plotly draws in the browser.

    ``summary`` is a sentence with the most important numbers, shown below the title. ``figure`` is
    plotly's ``data`` and ``layout``, without NaN or infinities. ``height`` is in pixels.
    """

    title: str
    summary: str
    figure: Mapping[str, Any]
    height: int = 320


class ChartRow(NamedTuple):
    """Charts that stand side by side on wide screens."""

    charts: Sequence[Chart]


class TableRow(NamedTuple):
    """Tables that stand side by side on wide screens."""

    tables: Sequence[Table]


class Details(NamedTuple):
    """Page parts, without charts, that are hidden until the reader opens them."""

    name: str
    parts: Sequence[Part]


Part: TypeAlias = (
    Sentence | Links | Alert | Facts | Table | TableRow | Code | InlineSvgs | SvgImage | Details
    | ChartRow | Chart
)  # fmt: skip


class Section(NamedTuple):
    """A section of a page."""

    title: str
    parts: Sequence[Part]


class Badge(NamedTuple):
    """The state of a run in a coloured label."""

    text: str
    kind: Literal["good", "bad", "half", "going"]  # half: resumable; going: running


def _is_number(cell: str | Links | Cell) -> bool:
    if isinstance(cell, Links):
        return False
    return _NUMBER.fullmatch(cell if isinstance(cell, str) else cell.text) is not None


# --- pages --------------------------------------------------------------------------------------


def page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    badge: Badge | None = None,
    opening: Sequence[Part] = (),
    footer: str = "",
) -> str:
    """Return a whole HTML document, in ASCII, without a final newline.

    The badge and the line ``lead`` stand below the title, followed by the parts in ``opening`` and
    by the sections that have parts.
    """
    shown = [section for section in sections if section.parts]
    parts = [*opening, *(part for section in shown for part in section.parts)]
    inner = [each for part in parts for each in _with_inner(part)]
    figures = [part.figure for part in inner if isinstance(part, Chart)]
    is_sortable = any(isinstance(part, Table) and part.is_sortable for part in inner)
    style = _file("style.css") + _file("page.css")
    if figures and not packed_plotly():
        opening = [*opening, Sentence(_WITHOUT_PLOTLY)]
        style += _NO_CHARTS
        figures = []
    return _rendered(
        _PAGE_TEMPLATE,
        title=title,
        sections=shown,
        lead=lead,
        badge=badge,
        opening=opening,
        footer=footer,
        style=style,
        charts=_chart_scripts(figures) if figures else None,
        sorting=_hashed_script("tables.js") if is_sortable else None,
    )


def _with_inner(part: Part) -> Iterator[Part]:
    """Yield a part of a page and the parts in it, in the order of the page."""
    yield part
    if isinstance(part, ChartRow):
        yield from part.charts
    elif isinstance(part, TableRow):
        yield from part.tables
    elif isinstance(part, Details):
        for each in part.parts:
            yield from _with_inner(each)


def fragment(heading: str, parts: Sequence[Part], *, kind: str = "") -> str:
    """Return an HTML fragment for a notebook, in ASCII, without effect on the notebook's style.

    ``parts`` must not contain charts. ``kind`` selects the colour of the heading, as for a
    Sentence.
    """
    style = _file("style.css")
    return _rendered("fragment.html.jinja", heading=heading, shown=parts, kind=kind, style=style)


def _chart_scripts(figures: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the contents of the ``script`` elements that draw a page's charts."""
    from popdist_py.html_pages.chart_colours import DARK

    return {
        "figures": figures,
        "dark_colours": DARK,
        "plotly": packed_plotly(),
        **_hashed_script("charts.js"),
    }


def _hashed_script(name: str) -> dict[str, str]:
    """Return a script of this package, and its hash for the content security policy of a page."""
    import base64
    import hashlib

    script = _file(name)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": script, "hash": hashed}


@cache
def packed_plotly() -> str:
    """Return plotly's JavaScript, compressed and in base64; empty if plotly is not installed.

    The JavaScript is one file without dependencies, in the folder of the Python package plotly. The
    package plotly is not imported, because the import would take half a second.
    """
    import base64
    import gzip

    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        return ""
    try:
        code = Path(spec.submodule_search_locations[0], _PLOTLY_FILE).read_bytes()
    except OSError:
        return ""
    return base64.b64encode(gzip.compress(code, _COMPRESSION_LEVEL, mtime=0)).decode("ascii")


# --- Jinja2 -------------------------------------------------------------------------------------


def showable(text: str) -> str:
    """Replace the characters of a text that XML forbids or browsers do not show."""
    return _UNSHOWABLE.sub("\ufffd", text)


@cache
def _file(name: str) -> str:
    return (_FOLDER / name).read_text("ascii")


def load_templates() -> None:
    """Import Jinja2 and compile the templates of a page, so that ``page`` takes less time later."""
    for name in ("parts.html.jinja", _PAGE_TEMPLATE):
        _templates().get_template(name)


def _rendered(template: str, **values: object) -> str:
    text = _templates().get_template(template).render(values)
    return text.encode("ascii", "xmlcharrefreplace").decode()


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        auto_reload=False,
        finalize=lambda value: value if hasattr(value, "__html__") else showable(str(value)),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["part_kind"] = lambda part: type(part).__name__.lower()
    return environment
