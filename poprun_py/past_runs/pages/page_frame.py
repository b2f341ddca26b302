"""The frame of a page: a title, sections, and what can stand in them, as one HTML file.

A page needs no network and makes no request: its policy forbids any, and any script but its own.
It is for light and dark screens, telephones and paper, and says everything without JavaScript too.
All text is escaped here; who makes a page gives plain text. Only text is made here.

Parts are named tuples: to make so many dataclasses takes half the time of a short job's page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from poprun_py.past_runs.pages.chart import Chart
from poprun_py.past_runs.pages.plotly_code import DRAWING, drawing_hash, packed_plotly
from poprun_py.planning.views.page_look import PAGE_LOOK
from poprun_py.planning.views.svg import STYLE, escaped


class Sentence(NamedTuple):
    """A paragraph."""

    text: str


class Badge(NamedTuple):
    """How something ended, in a few words: ``good``, ``bad``, ``half`` or ``going``."""

    text: str
    kind: str


class Links(NamedTuple):
    """Names of files, each with its address from where the page lies; in a cell or alone."""

    links: Sequence[tuple[str, str]]
    lead: str = ""


class Alert(NamedTuple):
    """What must not be overlooked; a failure is red."""

    text: str
    is_failure: bool = False


class Fact(NamedTuple):
    """A number that counts, large, what it is, and a few words about it."""

    name: str
    value: str
    note: str = ""


class Facts(NamedTuple):
    """Facts beside one another."""

    facts: Sequence[Fact]


class Table(NamedTuple):
    """Rows of text, or links, below the names of their columns.

    Attributes:
        name: of the table, for who does not see it.
        columns: their names.
        rows: with as many texts.
        marked: indices of rows that stand out.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Links]]
    marked: frozenset[int] = frozenset()


class Code(NamedTuple):
    """Commands, output or a traceback, as it is."""

    text: str


class Drawing(NamedTuple):
    """An SVG that this package has drawn: it stands in the page, in the page's colours."""

    svg: str
    name: str


class Picture(NamedTuple):
    """An SVG from elsewhere: it is shown as an image, in which no script runs."""

    svg: str
    name: str


class Beside(NamedTuple):
    """Charts beside one another where the screen is wide enough."""

    charts: Sequence[Chart]


class Folded(NamedTuple):
    """Parts that are seen when the reader opens them by their name; no charts."""

    name: str
    parts: Sequence[Part]


Part: TypeAlias = (
    "Sentence | Links | Alert | Facts | Table | Code | Drawing | Picture | Folded | Beside | Chart"
)


class Section(NamedTuple):
    """A section: its title, and its parts."""

    title: str
    parts: Sequence[Part]


_LOOK: Final = """
body{padding:16px 20px 48px;overflow-wrap:anywhere}
h1{font-size:1.5em;line-height:1.25;margin:.2em 0 .1em}
h2{font-size:1.2em;margin:2em 0 .5em;padding-top:.6em;border-top:1px solid #e2e8f0}
.badge{display:inline-block;padding:1px 9px;margin-right:4px;border-radius:9px;font-weight:650;
background:#e2e8f0;color:#334155}.good{background:#d1fae5;color:#065f46}
.bad{background:#dc2626;color:#fff}.half{background:#fef3c7;color:#92400e}
.going{background:#dbeafe;color:#1e40af}
p{margin:.5em 0}.lead{color:#475569;margin:.2em 0 1em}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin:.8em 0 0;font-size:14px}
a{color:#0056b4}:focus-visible{outline:2px solid #0056b4;outline-offset:2px}
.alert{margin:.7em 0;padding:7px 12px;border:1px solid #f59e0b;border-left-width:5px;
border-radius:4px;background:#fef3c7}
.failure{border-color:#dc2626;background:#fee2e2}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;
margin:1em 0;padding:0}
.facts div{padding:10px 14px;border:1px solid #e2e8f0;border-radius:8px;background:#fff}
.facts dt{font-size:13px;color:#475569}
.facts dd{margin:0}.facts .value{font-size:1.45em;font-weight:650;line-height:1.3;
font-variant-numeric:tabular-nums}.facts .note{font-size:12.5px;color:#475569;line-height:1.4}
figure{margin:1em 0;padding:12px 14px 8px;border:1px solid #e2e8f0;border-radius:8px;
background:#fff;break-inside:avoid}
figcaption{font-weight:650}figcaption span{display:block;font-weight:400;font-size:13.5px;
color:#475569}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));
gap:0 12px}.beside figure{min-width:0}
.plot{width:100%}.undrawn{height:auto!important;font-size:13.5px;font-style:italic}
.scroll{display:flex;flex-wrap:wrap;gap:10px;overflow-x:auto}
.scroll svg,.scroll img{display:block;max-width:none}
.rows{margin:.7em 0}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr.marked td{background:#fef3c7}
pre{overflow-x:auto;max-height:34em;overflow-y:auto}
details{margin:.7em 0}summary{cursor:pointer;font-weight:600}
details>:not(summary){margin-top:.5em}
footer{margin-top:3em;font-size:13px;color:#475569}
@media screen and (prefers-color-scheme:dark){
.lead,.facts dt,.facts .note,figcaption span,footer{color:#a8b5c7}
h2{border-color:#2c3a50}a{color:#8cc0ff}:focus-visible{outline-color:#8cc0ff}
.badge{background:#334155;color:#e2e8f0}.good{background:#064e3b;color:#a7f3d0}
.bad{background:#dc2626;color:#fff}.half{background:#422006;color:#fcd34d}
.going{background:#1e3a8a;color:#bfdbfe}
.facts div,figure{background:#172033;border-color:#2c3a50}
.alert{background:#422006;border-color:#d97706}.failure{background:#450a0a;border-color:#ef4444}
tr.marked td{background:#422006}}
@media (max-width:600px){body{padding:10px 12px 32px}
.facts{grid-template-columns:repeat(2,1fr);gap:8px}.facts div{padding:8px 10px}
figure{padding:10px 8px 4px}}
@media print{nav{display:none}pre{max-height:none}.scroll{overflow:visible}
.scroll svg,.scroll img{max-width:100%;height:auto}h2{break-after:avoid}}
"""
_NUMBER: Final = re.compile(r"[-+]?[\d.,]+( ?(%|x|[kMG]?i?B|ms|s|min|h|us|W))?|-|")
# Else there would be room for charts that nobody draws.
_WITHOUT_SCRIPT: Final = "<noscript><style>.plot{display:none}</style></noscript>"
_NOT_DRAWN: Final = "<noscript><p>Charts are drawn by JavaScript.</p></noscript>"


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

    Args:
        title: of the page.
        sections: in order; one without parts is left out.
        lead: a line below the title.
        badge: before the lead.
        opening: parts before the first section.
        footer: a line at the end.
    """
    shown = [section for section in sections if section.parts]
    charts: list[Chart] = []
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="lead">{_badge(badge)}{escaped(lead)}</p>' if lead or badge else "",
        *_parts(opening, charts),
        _contents(shown) if len(shown) > 2 else "",
    ]
    for number, section in enumerate(shown, 1):
        body += [
            f'<section id="s{number}" aria-labelledby="h{number}">',
            f'<h2 id="h{number}">{escaped(section.title)}</h2>',
            *_parts(section.parts, charts),
            "</section>",
        ]
    if footer:
        body.append(f"<footer>{escaped(footer)}</footer>")
    body += _scripts(charts)
    lines = "\n".join(line for line in body if line)
    allowed = f"script-src 'sha256-{drawing_hash()}' 'strict-dynamic'; " if charts else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {allowed}\
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"/>
<title>{escaped(title)}</title>
<style>{STYLE}{PAGE_LOOK}{_LOOK}</style>{_WITHOUT_SCRIPT if charts else ""}
</head>
<body>
{lines}
</body>
</html>"""


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<a href="#s{number}">{escaped(section.title)}</a>'
        for number, section in enumerate(sections, 1)
    )
    return f'<nav aria-label="Sections">{links}</nav>'


def _parts(parts: Iterable[Part], charts: list[Chart]) -> list[str]:
    return [_part(part, charts) for part in parts]


def _part(part: Part, charts: list[Chart]) -> str:
    """Return a part as HTML; a chart is put to the others, which are drawn in this order."""
    match part:
        case Sentence(text):
            return f"<p>{escaped(text)}</p>"
        case Links():
            return f"<p>{_linked(part)}</p>"
        case Alert(text, is_failure):
            kind = "alert failure" if is_failure else "alert"
            return f'<p class="{kind}" role="note">{escaped(text)}</p>'
        case Facts(facts):
            return f'<dl class="facts">{"".join(map(_fact, facts))}</dl>'
        case Table():
            return _table(part)
        case Code(text):
            return f'<pre tabindex="0">{escaped(text)}</pre>'
        case Drawing(svg, name):
            return _scrolling(svg, name)
        case Picture(svg, name):
            import base64

            data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
            source = f"data:image/svg+xml;base64,{data}"
            image = f'<img src="{source}" alt="{escaped(name)}"/>'
            return _scrolling(image, name, caption=f"<figcaption>{escaped(name)}</figcaption>")
        case _:
            return _with_charts(part, charts)


def _with_charts(part: Folded | Beside | Chart, charts: list[Chart]) -> str:
    match part:
        case Folded(name, inner):
            inside = "\n".join(_parts(inner, charts))
            return f"<details><summary>{escaped(name)}</summary>\n{inside}\n</details>"
        case Beside(several):
            return f'<div class="beside">{"".join(_parts(several, charts))}</div>'
        case Chart():
            charts.append(part)
            return _figure(part)


def _badge(badge: Badge | None) -> str:
    return f'<span class="badge {badge.kind}">{escaped(badge.text)}</span> ' if badge else ""


def _linked(links: Links) -> str:
    names = ", ".join(
        f'<a href="{escaped(address)}">{escaped(name)}</a>' for name, address in links.links
    )
    return f"{escaped(links.lead)}{names}"


def _cell(cell: str | Links) -> str:
    return (_linked(cell) or "-") if isinstance(cell, Links) else escaped(cell)


def _is_number(cell: str | Links) -> bool:
    return isinstance(cell, str) and _NUMBER.fullmatch(cell) is not None


def _fact(fact: Fact) -> str:
    note = f'<dd class="note">{escaped(fact.note)}</dd>' if fact.note else ""
    return (
        f'<div><dt>{escaped(fact.name)}</dt><dd class="value">{escaped(fact.value)}</dd>'
        f"{note}</div>"
    )


def _table(table: Table) -> str:
    """Return a table; columns of numbers stand at the right."""
    kinds = [
        ' class="n"' if all(_is_number(row[column]) for row in table.rows) else ""
        for column in range(len(table.columns))
    ]
    names = "".join(
        f'<th scope="col"{kind}>{escaped(name)}</th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    rows = [f"<tr>{names}</tr>"]
    for index, row in enumerate(table.rows):
        cells = "".join(
            f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        mark = ' class="marked"' if index in table.marked else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    return _box("rows", f"<table>{''.join(rows)}</table>", table.name)


def _scrolling(picture: str, name: str, *, caption: str = "") -> str:
    return f"<figure>{caption}{_box('scroll', picture, name)}</figure>"


def _box(kind: str, inside: str, name: str) -> str:
    """Return a box that scrolls; keys scroll only what can be reached with them."""
    region = f'tabindex="0" role="region" aria-label="{escaped(name)}"'
    return f'<div class="{kind}" {region}>{inside}</div>'


def _figure(chart: Chart) -> str:
    return (
        f"<figure><figcaption>{escaped(chart.title)}<span>{escaped(chart.told)}</span>"
        f'</figcaption><div class="plot" style="height:{chart.height}px" role="img" '
        f'aria-label="{escaped(chart.title)}: {escaped(chart.told)}"></div></figure>'
    )


def _scripts(charts: Sequence[Chart]) -> list[str]:
    """Return the figures, and plotly, and what draws them with it; nothing without charts."""
    if not charts:
        return []
    figures = json.dumps([chart.figure for chart in charts], allow_nan=False, separators=(",", ":"))
    # In JSON a letter may be written so, and then nothing in it ends the element.
    figures = figures.replace("<", "\\u003c")
    return [
        _NOT_DRAWN,
        f'<script type="application/json" id="figures">{figures}</script>',
        f'<script type="text/plain" id="plotly">{packed_plotly()}</script>',
        f"<script>{DRAWING}</script>",
    ]
