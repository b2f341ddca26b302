"""Objects from other hosts are loaded only if an instance of the job made them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.collectives.objects import ObjectCalls
from popdist_py.environment import SECRET
from popdist_py.errors import ForgedObjectError


class Forgery:
    """Runs when it is loaded."""

    loaded = 0

    def __reduce__(self):
        return _note, ()


def _note():
    Forgery.loaded += 1


class Wire(ObjectCalls):
    """Return a communicator of two instances; the bytes of the other instance are ``answer``."""

    instance_index = 0
    instances = (0, 1)

    def __init__(self, answer):
        self._answer = answer

    def _gather_bytes(self, data, signature, root=None):
        return [data, np.frombuffer(self._answer(data.tobytes()), np.uint8)]

    def _broadcast_bytes(self, data, signature, root):
        return np.frombuffer(self._answer(data.tobytes()), np.uint8)


def test_objects_of_the_job_travel(monkeypatch):
    for secret in ("", "s" * 64):
        monkeypatch.setenv(SECRET, secret)
        value = {"array": np.arange(5).tolist(), "more": (1, None)}
        assert Wire(bytes).all_gather_object(value) == [value, value]
        assert Wire(bytes).gather_object(value) == [value, value]
        assert Wire(bytes).broadcast_object(value) == value


def test_what_somebody_else_sends_is_not_loaded(monkeypatch):
    monkeypatch.setenv(SECRET, "s" * 64)
    forged = pickle.dumps(Forgery())
    signed_by_another = Wire(bytes)
    monkeypatch.setenv(SECRET, "t" * 64)
    sent = []
    signed_by_another._answer = lambda data: sent.append(data) or data
    signed_by_another.broadcast_object(Forgery())
    monkeypatch.setenv(SECRET, "s" * 64)
    Forgery.loaded = 0
    for answer in (forged, bytes(32) + forged, sent[0], b"", forged[:20]):
        for call in ("all_gather_object", "gather_object", "broadcast_object"):
            with pytest.raises(ForgedObjectError, match=r"was not sent by this job, so it was not"):
                getattr(Wire(lambda _, answer=answer: answer), call)(1)
    assert Forgery.loaded == 0


@given(st.integers(0, 60), st.integers(0, 7))
def test_no_bit_of_an_object_may_change_on_its_way(at, bit):
    def changed(data):
        found = bytearray(data)
        found[at % len(found)] ^= 1 << bit
        return bytes(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "s" * 64)
        with pytest.raises(ForgedObjectError):
            Wire(changed).broadcast_object([1, 2, "three"])
