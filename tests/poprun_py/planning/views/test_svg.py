"""Blocks of SVG, whose texts must fit and whose arrangements must have the right size."""

from __future__ import annotations

import html
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.svg_boxes import boxes

from poprun_py.planning.views.svg import (
    STYLE,
    Block,
    beside,
    cell,
    document,
    escaped,
    flowing,
    framed,
    paragraph,
    stacked,
)

BLOCKS = st.lists(st.builds(Block, st.integers(1, 50), st.integers(1, 50), st.just("")), min_size=1)


def drawn(block: Block) -> str:
    return document(block, title="t", style=STYLE)


def lines(block: Block) -> list[str]:
    return [html.unescape(line) for line in re.findall(r"<text[^>]*>([^<]*)", block.body)]


@pytest.mark.parametrize("kind", ["text", "name"])  # regular and bold
def test_every_ascii_character_fits_into_the_width_of_its_text(kind):
    for letter in string.printable.strip():
        (word,), _ = boxes(drawn(block := paragraph(letter, kind, 200)))
        assert word.right <= block.width, letter


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"])))
def test_a_paragraph_has_all_its_text_in_lines_that_fit(text):
    block = paragraph(text, "note", 200)
    assert "".join("".join(lines(block)).split()) == "".join(text.split())
    assert block.width <= 200
    assert all(word.right <= block.width for word in boxes(drawn(block))[0])


def test_a_paragraph_is_as_wide_as_its_widest_line():
    wide = "W" * 10
    assert paragraph(f"{'i' * 12} {wide}", "note", 120).width == paragraph(wide, "note", 120).width


def test_a_long_blank_text_has_no_width():
    assert paragraph(" " * 100, "note", 200).width == 0


def test_a_word_that_does_not_fit_is_broken_after_hyphens():
    block = paragraph("a-very-long-host-name-0.example.com", "title", 344)
    assert lines(block) == ["a-very-long-host-", "name-0.example.com"]


def test_a_paragraph_is_broken_after_commas():
    assert lines(paragraph("CPUs 0-15,32-47; 64.0 GiB of memory", "text", 150)) == [
        *("CPUs 0-15,32-47;", "64.0 GiB of memory")
    ]


@given(BLOCKS, st.integers(0, 9))
def test_arrangements_are_as_large_as_their_blocks(blocks, gap):
    gaps = gap * (len(blocks) - 1)
    high, wide = [b.height for b in blocks], [b.width for b in blocks]
    below, line = stacked(blocks, gap=gap), beside(blocks, gap=gap)
    assert (below.width, below.height) == (max(wide), sum(high) + gaps)
    assert (line.width, line.height) == (sum(wide) + gaps, max(high))


@given(BLOCKS, st.integers(0, 9), st.integers(50, 200))
def test_flowing_blocks_stay_within_the_width(blocks, gap, width):
    assert flowing(blocks, width, gap=gap).width <= width


def test_a_frame_has_the_smallest_width():
    inner = Block(10, 10, "")
    assert (framed(inner, "card", pad=5).width, framed(inner, "card", pad=5).height) == (20, 20)
    assert framed(inner, "card", pad=5, width=90).width == 90
    assert framed(inner, "card", pad=5, width=1).width == 20


def test_a_cell_is_divided_among_its_kinds_and_grows_with_its_label():
    texts, rectangles = boxes(drawn(cell("10/11", "own0", "own1")))
    _, left, right = rectangles
    assert (left.left, left.right, right.right) == (0, right.left, cell("10/11", "x").width)
    assert texts[0].right <= right.right
    assert cell("", "own0").width == 17


@given(st.text(st.characters(codec=None)))
def test_escaped_text_is_ascii_without_markup(text):
    shown = escaped(text)
    assert shown.isascii()
    assert not set("<>\"'\x00\x1b") & set(shown)
    assert len(html.unescape(shown)) == len(text)
