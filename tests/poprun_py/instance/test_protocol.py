"""Frames on a stream socket: however the stream is cut, the same frames come out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.instance import protocol

FRAMES = st.lists(st.tuples(st.sampled_from([protocol.STDOUT, protocol.DIED]), st.binary()))


@given(FRAMES, st.integers(1, 9))
def test_frames_survive_any_cut(frames, size):
    stream = b"".join(protocol.pack(kind, payload) for kind, payload in frames)
    reader, seen = protocol.Reader(), []
    for start in range(0, len(stream), size):
        seen += reader.feed(stream[start : start + size])
    assert seen == frames


def test_a_frame_is_its_kind_its_length_and_its_payload():
    assert protocol.pack(protocol.STDOUT, b"ab") == b"O\x00\x00\x00\x02ab"
    assert protocol.pack(protocol.BYE) == b"B\x00\x00\x00\x00"


def test_a_peer_that_speaks_something_else_is_refused():
    with pytest.raises(ValueError, match="frame too long"):
        protocol.Reader().feed(b"GET / HTTP/1.1\r\n")
