"""Readers of others' bytes take any of them: what they read changed, and bytes at random."""

from __future__ import annotations

import tracemalloc
from functools import cache

import pytest
from fuzz.targets import TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st

# Beside what is said this much may be in memory: tables of a parser, not what is announced.
MOST_BYTES = 8 << 20
EXAMPLES = {"gate": 30, "spans": 30, "plans": 30}
HUGE = (b"\xff" * 4, b"\xff" * 8, b"\x80\0\0\0", b"\x7f" + b"\xff" * 7, bytes(8), b"[" * 3000)


@cache
def seeds(name):
    return TARGETS[name].seeds()


@st.composite
def changed(draw, name):
    """Bytes that a target reads, of which some are others, gone, more, moved, or a huge length."""
    data = bytearray(draw(st.sampled_from(seeds(name))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 40))
        what = draw(st.sampled_from(["flip", "other", "gone", "more", "huge", "cut", "again"]))
        if what == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "other":
            data[at : at + length] = draw(st.binary(min_size=length, max_size=length))
        elif what == "gone":
            del data[at : at + length]
        elif what == "more":
            data[at:at] = draw(st.binary(max_size=40))
        elif what == "huge":
            more = draw(st.sampled_from(HUGE))
            data[at : at + len(more)] = more
        elif what == "cut":
            del data[at:]
        elif what == "again":
            data[at:at] = data[at : at + 10 * length]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_others_say_is_read_or_refused_and_never_more(name):
    run = TARGETS[name].run

    @settings(max_examples=EXAMPLES.get(name, 60))
    @given(changed(name) | st.binary(max_size=300))
    def tried(data):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run(data)
        assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES + 20 * len(data)

    for data in seeds(name):
        run(data)
    tracemalloc.start()
    try:
        tried()
    finally:
        tracemalloc.stop()
