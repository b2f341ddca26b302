"""Pages of the site for files and folders outside docs/ to which pages link.

On GitHub, such a link leads to the file. On the site, the link leads to a page that shows the file.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from sphinx.application import Sphinx

__all__ = ["ROOT", "mark_links", "pages", "rendered", "resolve_links"]

ROOT = Path(__file__).resolve().parents[3]
_SCHEME = "project:"
# [text](../examples/train.py), in a page of docs/ or of a folder in it
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
# [text](docs/runs.md#folders), in a Markdown file outside docs/
_LINK_OUTSIDE = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}


def mark_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Mark links to files outside docs/ with a scheme that Sphinx does not resolve."""
    folder = (Path(app.srcdir) / page).parent

    def marked(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(app.srcdir) or not target.is_relative_to(ROOT):
            return link[0]
        return f"]({_SCHEME}{target.relative_to(ROOT)}{link[2] or ''})"

    source[0] = _LINK.sub(marked, source[0])


def resolve_links(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make the marked links lead to the pages of their targets."""
    found = _targets(app)
    for node in doctree.findall(nodes.reference):
        address = node.get("refuri", "")
        if not address.startswith(_SCHEME):
            continue
        target, sign, heading = address.removeprefix(_SCHEME).partition("#")
        found.add(target)
        if app.builder.format == "html":
            relative = app.builder.get_relative_uri(page, f"source/{target}")
            # Only Markdown files have anchors.
            node["refuri"] = f"{relative}{sign}{heading}" if target.endswith(".md") else relative


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each target, and for each file in a folder that is a target."""
    wanted = sorted(_targets(app))
    made = set()
    while wanted:
        target = wanted.pop(0)
        if target in made:
            continue
        made.add(target)
        path = ROOT / target
        if path.is_dir():
            inside = [x for x in sorted(path.iterdir()) if _is_shown(x)]
            wanted += [str(x.relative_to(ROOT)) for x in inside]
            body = _listing(path, inside)
        elif path.suffix == ".md":
            body = rendered(app, path, wanted)
        else:
            body = _highlighted(app, path)
        title = html.escape(target)
        if path.suffix != ".md":
            body = f"<h1>{title}</h1>\n{body}"
        yield f"source/{target}", {"title": title, "body": body}, "page.html"


def _targets(app: Sphinx) -> set[str]:
    # Kept with the environment, since a second build reads only the pages that have changed.
    if not hasattr(app.env, "project_files"):
        app.env.project_files = set()  # type: ignore[attr-defined]
    found: set[str] = app.env.project_files  # type: ignore[attr-defined]
    return found


def _is_shown(path: Path) -> bool:
    if path.name.startswith((".", "__pycache__")):
        return False
    return path.is_dir() or path.suffix in (*_LANGUAGES, ".md", ".txt", ".cfg")


def _listing(folder: Path, inside: list[Path]) -> str:
    rows = "".join(
        f'<li><a href="{folder.name}/{x.name}.html">{html.escape(x.name)}</a></li>' for x in inside
    )
    return f"<ul>{rows}</ul>"


def _highlighted(app: Sphinx, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return _block(app, text, _LANGUAGES.get(path.suffix, "text"))


def _block(app: Sphinx, text: str, language: str) -> str:
    builder: Any = app.builder
    block = builder.highlighter.highlight_block(text, language, force=True, linenos=False)
    return f'<div class="highlight-{language} notranslate">{block}</div>'


def rendered(app: Sphinx, path: Path, wanted: list[str]) -> str:
    """Return a Markdown file as HTML, and add the targets of its links to ``wanted``."""
    page = f"source/{path.relative_to(ROOT)}"
    builder: Any = app.builder

    def led(link: re.Match[str]) -> str:
        target, heading = (path.parent / link[1]).resolve(), link[2] or ""
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        if target.is_relative_to(app.srcdir):
            to = str(target.relative_to(app.srcdir).with_suffix(""))
        else:
            wanted.append(str(target.relative_to(ROOT)))
            to = f"source/{wanted[-1]}"
        return f"]({builder.get_relative_uri(page, to)}{heading})"

    markdown = MarkdownIt("gfm-like", {"linkify": False}).use(anchors_plugin, max_level=4)
    # On a phone, the theme lets blocks and tables with these classes scroll.
    markdown.renderer.rules.update(
        fence=lambda tokens, index, *_: _block(
            app, tokens[index].content, tokens[index].info or "text"
        ),
        table_open=lambda *_: '<div class="table-wrapper"><table class="docutils">',
        table_close=lambda *_: "</table></div>",
    )
    return str(markdown.render(_LINK_OUTSIDE.sub(led, path.read_text(encoding="utf-8"))))
