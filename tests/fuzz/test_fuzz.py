"""Readers of untrusted bytes get valid inputs that were changed, and random bytes."""

from __future__ import annotations

import tracemalloc
from functools import cache

import pytest
from fuzz.targets import TARGETS
from hypothesis import given
from hypothesis import strategies as st

# A reader may allocate this much beside its input: tables of a parser, but no announced length.
MOST_BYTES = 8 << 20
HUGE = (b"\xff" * 4, b"\xff" * 8, b"\x80\0\0\0", b"\x7f" + b"\xff" * 7, bytes(8), b"[" * 3000)


@cache
def seeds(name):
    return TARGETS[name].seeds()


@st.composite
def changed(draw, name):
    """Draw a valid input of a target with bytes changed, removed, added, or made a huge length."""
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
@given(examples=st.data())
def test_a_reader_accepts_or_refuses_any_bytes_and_allocates_little(name, examples):
    data = examples.draw(changed(name) | st.binary(max_size=300))
    tracemalloc.start()
    try:
        TARGETS[name].run(data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < MOST_BYTES + 20 * len(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_accepts_its_seeds(name):
    for data in seeds(name):
        TARGETS[name].run(data)
