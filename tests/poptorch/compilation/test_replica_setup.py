"""What is known from earlier runs about how replicas run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py import measured_values
from popdist_py.poptorch.compilation import replica_setup
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


def test_each_back_end_begins_with_what_those_before_it_gave_back(monkeypatch):
    held = []

    def noted():
        parameters = training._compiled.program.training.optimizer.parameters
        held.append([parameter.grad is not None for parameter in parameters])

    monkeypatch.setattr(replica_setup, "give_back_kept_memory", noted)
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options().replicationFactor(4), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training(*classified(8))
    replicas = training._compiled.program.replicas
    assert len(replicas.names) > 1
    for _ in range(50):
        if replicas.back_end is not None:
            break
        training(*classified(8))
    assert replicas.back_end is not None
    assert held
    assert not any(any(gradients) for gradients in held)
