"""Frames are read from a stream correctly, wherever the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.instance import control_protocol

FRAMES = st.lists(
    st.tuples(
        st.sampled_from([control_protocol.STDOUT, control_protocol.PROGRAM_ENDED]), st.binary()
    )
)


@given(FRAMES, st.integers(1, 9))
def test_frames_are_read_wherever_the_stream_is_cut(frames, size):
    stream = b"".join(control_protocol.pack(kind, payload) for kind, payload in frames)
    reader, seen = control_protocol.Reader(), []
    for start in range(0, len(stream), size):
        seen += reader.feed(stream[start : start + size])
    assert seen == frames


def test_a_frame_consists_of_kind_length_and_payload():
    assert control_protocol.pack(control_protocol.STDOUT, b"ab") == b"O\x00\x00\x00\x02ab"
    assert control_protocol.pack(control_protocol.BYE) == b"B\x00\x00\x00\x00"


def test_another_protocol_is_refused():
    with pytest.raises(ValueError, match="frame too long"):
        control_protocol.Reader().feed(b"GET / HTTP/1.1\r\n")
