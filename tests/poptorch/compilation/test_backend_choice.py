"""Which back end "auto" takes: a rule decides, and never a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py
import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import backends
from popdist_py.poptorch.compilation.backend_comparison import BackendComparison


class Noisy(nn.Module):
    """A model that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


class Recurrent(nn.Module):
    """A recurrent layer over three numbers of each sample, with dropout behind it or not."""

    def __init__(self, layer, dropout=0.0):
        super().__init__()
        self.layer, self.dropout = layer(2, 4, batch_first=True), nn.Dropout(dropout)

    def forward(self, x, y):
        out = self.dropout(self.layer(x.unflatten(1, (3, 2)))[0][:, -1])
        return out, nn.functional.cross_entropy(out, y)


def trained(model, replicas, samples, execution="auto", steps=1):
    options = quiet_options().replicationFactor(replicas).broadcastBuffers(False)
    options.outputMode(poptorch.OutputMode.All)
    options.Emulator.replicaExecution(execution)
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    losses = [training(*classified(replicas * samples, seed=step))[1] for step in range(steps)]
    return training._compiled.program.back_end, torch.stack(losses)


@pytest.mark.parametrize(
    ("make", "replicas", "samples", "expected"),
    [
        (Mlp, 1, 4, "graph"),
        (Mlp, 2, 4, "fused graph"),
        (Noisy, 1, 4, "graph"),
        (Noisy, 4, 4, "graph"),
        (lambda: Recurrent(nn.LSTM), 1, 1, "loop"),
        (lambda: Recurrent(nn.LSTM), 2, 1, "loop"),
        (lambda: Recurrent(nn.LSTM), 4, 4, "fused graph"),
        (lambda: Recurrent(nn.LSTM), 4, 5, "loop"),
        (lambda: Recurrent(nn.LSTM, 0.3), 4, 8, "fused"),
        (lambda: Recurrent(nn.GRU), 2, 8, "fused graph"),
        (lambda: Recurrent(nn.GRU, 0.3), 2, 4, "graph"),
        (lambda: Recurrent(nn.GRU, 0.3), 4, 4, "fused"),
    ],
)
def test_the_model_decides(make, replicas, samples, expected):
    torch.manual_seed(0)
    assert trained(make(), replicas, samples)[0] == expected


def test_two_runs_compute_the_same_bits():
    torch.manual_seed(0)
    model = Mlp()
    (name, losses), (again, same) = (trained(copy.deepcopy(model), 4, 4, steps=8) for _ in range(2))
    assert name == again == "fused graph"
    assert torch.equal(losses, same)


def test_what_does_not_agree_is_passed_over(monkeypatch):
    difference, compared = BackendComparison.difference, []

    def differs_at_first(self, replicas):
        compared.append(replicas)
        return "it differs" if len(compared) == 1 else difference(self, replicas)

    monkeypatch.setattr(BackendComparison, "difference", differs_at_first)
    assert trained(Mlp(), 2, 4)[0] == "graph"
    assert len(compared) == 2


def _chosen_if_one_instance_refuses(refused):
    """Return what an instance chooses if instance 1 cannot make the back end ``refused``."""

    def broken(*_):
        raise MemoryError("no room")

    rows = backends.BACKENDS
    if popdist_py.getInstanceIndex() == 1:
        rows = tuple(replace(row, make=broken) if row.name == refused else row for row in rows)
    model = Mlp()
    options = poptorch.DistributedOptions().showCompilationProgressBar(False)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
    with mock.patch.object(backends, "BACKENDS", rows):
        training.compile(*classified(8))
    return training._compiled.program.back_end


@pytest.mark.mpi
@pytest.mark.parametrize(("refused", "expected"), [("graph", "loop"), ("none", "graph")])
def test_instances_choose_the_same(instances, refused, expected):
    assert instances.run(_chosen_if_one_instance_refuses, refused) == [expected, expected]
