"""The page docs/old-spellings.md, from the table of old spellings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from popdist_py.poptorch.old_spellings import TABLE, How

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "old-spellings.md"
TOP = """# Old spellings

Names and arguments of earlier PopTorch releases work in `popdist_py.poptorch`. The first use of
each is a warning of the log that names the present spelling; of several
instances, instance 0 speaks.
"""
HEADINGS = {
    How.SAME: (
        "Same effect",
        "What comes back is the object of today's name.",
        ("old", "write"),
    ),
    How.NOTHING: (
        "No effect",
        "These are accepted, and a warning says that they do nothing.",
        ("old", "why"),
    ),
    How.REFUSED: (
        "Refused",
        "A name is an AttributeError, an argument a TypeError; both say what to do.",
        ("old", "instead"),
    ),
}


def page() -> str:
    """Return the page."""
    return TOP + "".join(line for how in HEADINGS for line in _section(how))


def _section(how: How) -> Iterator[str]:
    title, text, columns = HEADINGS[how]
    yield f"\n## {title}\n\n{text}\n\n"
    yield f"| {columns[0]} | {columns[1]} |\n|---|---|\n"
    for spelling in TABLE:
        if spelling.how is how:
            right = f"`{spelling.new_text}`" if spelling.new_text else spelling.why
            yield f"| `{spelling.old_text}` | {right} |\n"


def files() -> dict[Path, str]:
    """Return the page by its file."""
    return {PAGE: page()}
