"""Fewer points: no peak, no gap and no end is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.past_runs.pages.thinning import thinned

VALUES = st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=400)
MOST = st.integers(min_value=5, max_value=60)


def finite(values):
    return [v for v in values if v is not None and math.isfinite(v)]


@given(VALUES, MOST)
def test_bounded_and_in_order(ys, most):
    kept = thinned(ys, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert all(0 <= index < len(ys) for index in kept)
    assert kept == list(range(len(ys))) or len(ys) > most


@given(VALUES, MOST)
def test_extremes_and_ends_stay(ys, most):
    kept = thinned(ys, most)
    if ys:
        assert {kept[0], kept[-1]} == {0, len(ys) - 1}
    inner, left = finite(ys[1:-1]), finite([ys[index] for index in kept])
    if inner:
        assert min(left) <= min(inner)
        assert max(left) >= max(inner)


@given(st.lists(st.floats(0, 1), min_size=50, max_size=400), st.data())
def test_a_gap_stays(ys, data):
    at = data.draw(st.integers(1, len(ys) - 2))
    gapped = [*ys[:at], None, *ys[at + 1 :]]
    assert at in thinned(gapped, 20)
