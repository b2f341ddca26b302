"""Messages are wrapped at words, and what a user copies from them stays whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.display.terminal_rows import num_columns, wrapped

WORDS = "poprun-py: warning: three instances share two CPUs: at most two of them run at any time"


def test_a_message_is_wrapped_between_words():
    assert wrapped(WORDS, 40).splitlines() == [
        "poprun-py: warning: three instances",
        "  share two CPUs: at most two of them",
        "  run at any time",
    ]
    assert wrapped(WORDS, len(WORDS)) == WORDS
    assert wrapped(WORDS, 10) == WORDS


@pytest.mark.parametrize(
    ("message", "whole"),
    [
        (f"poprun-py: the report is {'/folder' * 12}/report.json for you", "/folder" * 12),
        ("poprun-py: warning: make it larger: docker run --shm-size=1g, or",
         "docker run --shm-size=1g,"),
        ("poprun-py: more is shown by poprun-py report runs/latest, in a page",
         "poprun-py report runs/latest,"),
        ("poprun-py: error: name the file: --import-config FILE", "--import-config FILE"),
        ("poprun-py: error: expected one of the words 'two words here' and", "'two words here'"),
        ("poprun-py: the command ssh -o BatchMode=yes -o ConnectTimeout=10 host1.example.com true",
         "ssh -o BatchMode=yes -o ConnectTimeout=10 host1.example.com true"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", [40, 50])
def test_text_to_copy_is_not_broken(message, whole, columns):
    rows = wrapped(message, columns).splitlines()
    assert len(rows) > 1
    assert any(whole in row for row in rows), rows


def test_wide_and_combining_characters_are_counted():
    assert [num_columns(text) for text in ("abc", "漢字", "é", "e\u0301", "█▌")] == [3, 4, 1, 1, 2]
    assert wrapped("poprun-py: 漢字漢字 漢字漢字", 21) == "poprun-py: 漢字漢字\n  漢字漢字"


ANY_WORDS = st.lists(
    st.one_of(
        st.text("ab'\"`(),.:-", max_size=12),
        st.sampled_from(["--option", "-x", "ssh", "python", "=", "/path/" * 9, "漢字"]),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(ANY_WORDS, st.integers(20, 90))
def test_all_words_stay_and_only_whole_phrases_are_too_long(words, columns):
    line = " ".join(words)
    rows = wrapped(line, columns).split("\n")
    assert [word for row in rows for word in row.split(" ") if word] == [w for w in words if w]
    for row in rows:
        has_command = any(word in row.split(" ") for word in ("ssh", "python"))
        assert num_columns(row) <= columns or has_command or "/path/" * 9 in row
