"""What is known from earlier runs about how replicas run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.models import Mlp, quiet_options

from popdist_py import measured_values
from popdist_py.poptorch.compilation.replica_setup import ReplicaSetup


@pytest.mark.parametrize(
    ("instances", "index", "expected"), [(2, 0, True), (2, 1, False), (1, 0, True), (1, 1, True)]
)
def test_only_instances_whose_entry_is_read_store_one(instances, index, expected, monkeypatch):
    stored = []
    monkeypatch.setattr(measured_values, "remember", lambda *words: stored.append(words))
    setup = ReplicaSetup(
        user_model=Mlp(),
        options=quiet_options(),
        optimizer=None,
        communicator=SimpleNamespace(num_instances=instances, instance_index=index),
    )
    setup._settled("", "loop", {"loop": 1.0})
    assert stored == []
    setup._settled("a key", "loop", {"loop": 1.0})
    assert stored == ([("back_ends", "a key", "loop")] if expected else [])
