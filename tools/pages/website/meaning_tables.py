"""Tables that explain options, variables or commands, which the style sheet draws in its own way.

The last column of these tables contains sentences, so it needs most of the width. A browser alone
gives the width to the first column, because an option such as ``--smt yes|no`` is not broken. Here
the choices of an option may be broken after each ``|``.
"""

from __future__ import annotations

import html
import re
from typing import Final

from docutils import nodes
from sphinx.application import Sphinx

__all__ = ["mark_tables"]

# The titles of a last column that contains sentences.
_MEANINGS: Final = ("meaning", "means", "effect", "what it does")
_DEFAULT: Final = "default"
# A part of an option that stays on one line: up to a space, after a bar, or before a bracket.
_PART: Final = re.compile(r"\s*[^\s|\[]+\|?|\s*\[[^\s|\[]*\|?|\s*\|")


def mark_tables(app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Give tables with a column of meanings the classes that docs/static/style.css names."""
    if app.builder.format != "html":
        return
    for table in doctree.findall(nodes.table):
        titles = [entry.astext() for entry in _entries(table, nodes.thead)]
        if not titles or titles[-1] not in _MEANINGS:
            continue
        table["classes"].append("meanings")
        if _DEFAULT in titles[1:-1]:
            table["classes"].append("with-defaults")
        for index, entry in enumerate(_entries(table, nodes.tbody)):
            if index % len(titles) == 0:
                _let_break(entry)


def _entries(table: nodes.table, kind: type[nodes.Element]) -> list[nodes.entry]:
    return [entry for part in table.findall(kind) for entry in part.findall(nodes.entry)]


def _let_break(entry: nodes.entry) -> None:
    """Let a browser break the code in a cell after each ``|`` and before each ``[``."""
    for code in list(entry.findall(nodes.literal)):
        text = code.astext()
        if "|" in text:
            code.replace_self(nodes.raw("", breakable(text), format="html"))


def breakable(text: str) -> str:
    """Return code as HTML that may be broken at spaces, after each ``|`` and before each ``[``."""
    parts = map(html.escape, _PART.findall(text))
    spans = [re.sub(r"(\S+)", r'<span class="pre">\1</span>', each) for each in parts]
    return f'<code class="docutils literal notranslate">{"<wbr>".join(spans)}</code>'
