"""examples/train.py: what its options choose; tests/system trains with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from examples.common.sample_data import make_mnist
from popdist_py import poptorch

pytestmark = pytest.mark.examples


class Loaded(Exception):
    """The program made its loader."""


@pytest.fixture
def main(program, monkeypatch):
    """Return the program's main, alone in its job, up to where it makes its loader."""
    found = program("train.py")["main"]
    alone = SimpleNamespace(isPopdistEnvSet=lambda: False, init=lambda: None)
    monkeypatch.setitem(found.__globals__, "popdist_py", alone)
    return found


def test_the_data_set_and_the_micro_batch_are_those_given(main, monkeypatch, tmp_path):
    make_mnist(tmp_path, training=20, test=10)
    given = []

    def load(_, dataset, *, batch_size, **__):
        given.append((tuple(dataset.tensors[0].shape[1:]), batch_size))
        raise Loaded

    monkeypatch.setattr(poptorch, "DataLoader", load)
    for words in ([], ["--dataset", "mnist", "--micro-batch", "2"]):
        with pytest.raises(Loaded):
            main([*words, "--data-dir", str(tmp_path)])
    assert given == [((1, 8, 8), 4), ((1, 28, 28), 2)]
