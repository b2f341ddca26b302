"""The documents stay small enough that a reader finds the way in them."""

from __future__ import annotations

from support.repository import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def num_words(path):
    """Return the number of words, as ``wc -w`` counts them."""
    return len(path.read_text(encoding="utf-8").split())


def test_the_readme_has_at_most_600_words():
    assert num_words(ROOT / "README.md") <= 600


def test_there_are_at_most_30_pages_with_45_000_words():
    words = {str(path.relative_to(ROOT)): num_words(path) for path in PAGES}
    longest = sorted(words.items(), key=lambda item: -item[1])[:5]
    assert len(words) <= 30, sorted(words)
    assert sum(words.values()) <= 45_000, longest


def test_the_code_that_writes_pages_has_at_most_1_400_lines():
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted((ROOT / "tools" / "pages").rglob("*.py"))
    }
    assert sum(lines.values()) <= 1_400, lines
