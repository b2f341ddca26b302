"""Printable documents: the bars of charts, the length of lines, and special characters in HTML."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.documents.document import (
    Column,
    Course,
    Document,
    Section,
    Share,
    html,
    levels,
    text,
)

values = st.lists(st.floats(0, 2), max_size=200)


@given(values, st.integers(3, 10))
def test_levels_show_the_highest_values(course, count):
    made = levels(course, count)
    assert len(made) == min(60, len(course))
    assert all(0 <= level < count for level in made)
    # Each bar shows the highest of its values, so no peak is lost.
    if course:
        assert (max(made) == count - 1) == (max(course) >= 1)
        assert (max(made) == 0) == (max(course) <= 0)


def test_a_peak_of_many_values_is_not_lost():
    course = [0.0] * 500
    course[123] = 1.0
    made = levels(course, 4)
    assert (len(made), made.count(3), made.count(0)) == (60, 1, 59)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=60), st.integers(3, 10))
def test_levels_rise_with_values(course, count):
    course = sorted(course)
    assert levels(course, count) == sorted(levels(course, count))


@given(st.lists(st.text("ab.", max_size=150), min_size=1, max_size=4), values)
def test_lines_are_at_most_100_characters(names, course):
    rows = tuple((name, Share(0.5), Course(tuple(course))) for name in names)
    columns = (Column("name", is_words=True), Column("share"), Column("course"))
    section = Section("title", columns, rows, notes=("word " * 50,))
    for line in text(Document("headline", True, (section,))).splitlines():
        assert len(line) <= 100


def test_text_of_a_small_table():
    columns = (Column("cycles"), Column("of", is_words=True))
    rows = (("1,234", "a"), ("5", "layer.1"))
    section = Section("Title", columns, rows, notes=("first\n\nlast",))
    assert text(Document("Headline", False, (section,))).splitlines() == [
        "Headline",
        "",
        "Title",
        "  cycles  of",
        "   1,234  a",
        "       5  layer.1",
        "  first",
        "",
        "  last",
    ]


def test_html_escapes_names():
    section = Section("a<b", (Column("x"),), (("<script>",),), ("1 < 2",))
    shown = html(Document("h&m", True, (section,)))
    assert "<script>" not in shown
    assert "h&amp;m" in shown
    assert "1 &lt; 2" in shown


def test_words_of_a_wrapping_column_continue_on_the_next_line():
    words = " ".join(["recomputation"] * 12)
    columns = (Column("MB"), Column("change", is_words=True, wraps=True))
    lines = text(Document("Head", True, (Section("Table", columns, (("1", words),)),))).split("\n")
    assert max(map(len, lines)) <= 100
    assert " ".join(" ".join(lines).split()) == f"Head Table MB change 1 {words}"
