"""The numbers of instances of a scaling, and the order of its runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.command.scale import parse_counts, scaling_runs
from poprun_py.errors import UsageError


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (1,)), ("1,2,4", (1, 2, 4)), ("1-4", (1, 2, 3, 4)), ("8, 1-2", (8, 1, 2))],
)
def test_forms_of_counts(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "1,", "4-1", "1-", "-1", "two", "1-65", "1-1000000", "²"]
)
def test_texts_that_are_not_counts_are_refused(text):
    with pytest.raises(UsageError, match="expected counts of instances"):
        parse_counts(text)


def test_a_count_given_twice_is_refused():
    with pytest.raises(UsageError, match="2 is given twice"):
        parse_counts("1-3,2")


def test_too_many_counts_are_refused():
    with pytest.raises(UsageError, match="at most 64"):
        parse_counts("1-40,101-140")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True), st.integers(1, 5))
def test_the_runs_of_all_counts_alternate(counts, repeats):
    runs = scaling_runs("scale-x", counts, repeats)
    assert [count for _, count in runs] == counts * repeats
    assert len({name for name, _ in runs}) == len(runs)
