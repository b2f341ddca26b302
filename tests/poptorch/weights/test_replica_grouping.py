"""Weights that a group of replicas has for itself."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


class TestGroupedWeights:
    class Scale(nn.Module):
        def __init__(self, groups):
            super().__init__()
            self.w = nn.Parameter(torch.arange(2.0 * groups).reshape(groups, 2) + 1)

        def forward(self, x):
            return poptorch.identity_loss(self.w * x, "sum"), self.w * x

    @pytest.mark.parametrize(
        ("kind", "size", "rows"),
        [
            (poptorch.CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
            (poptorch.CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
            (poptorch.CommGroupType.NoGrouping, 1, [0, 1, 2, 3]),
            (poptorch.CommGroupType.All, 4, [0, 0, 0, 0]),
        ],
    )
    def test_groups_learn_by_themselves(self, kind, size, rows):
        model = self.Scale(max(rows) + 1)
        before = model.w.detach().clone()
        options = quiet_options().replicationFactor(4).outputMode(poptorch.OutputMode.All)
        training = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        training.w.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
        x = torch.arange(1.0, 5.0)[:, None].expand(4, 2).contiguous()
        _, out = training(x)
        torch.testing.assert_close(out, before[rows] * x)
        # The mean is over all replicas, the sum inside a group only.
        gradient = torch.zeros_like(before).index_add_(0, torch.tensor(rows), x) / 4
        torch.testing.assert_close(model.w.detach(), before - gradient)

    def test_all_replicas_can_be_read(self):
        model = self.Scale(2)
        training = poptorch.trainingModel(
            model, quiet_options().replicationFactor(4), torch.optim.SGD(model.parameters(), lr=0)
        )
        training.w.replicaGrouping(
            poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.AllReplicas
        )
        training(torch.ones(4, 2))
        assert model.w.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]

    def test_optimizer_state_has_a_row_for_each_group(self):
        def wrapped(model):
            optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
            options = quiet_options().replicationFactor(4)
            training = poptorch.trainingModel(model, options, optimizer)
            training.w.replicaGrouping(
                poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.OnePerGroup
            )
            return training, optimizer

        model = self.Scale(2)
        whole, optimizer = wrapped(model)
        x = torch.arange(8.0).reshape(4, 2)
        whole(x)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        assert set(saved["ipu_state"]) == {"Accl1___w", "Accl2___w", "Step___w"}
        gradients = x.reshape(2, 2, 2).sum(1) / 4
        torch.testing.assert_close(saved["ipu_state"]["Accl1___w"], 0.1 * gradients)
        again = self.Scale(2)
        again.load_state_dict(weights)
        continued, optimizer = wrapped(again)
        optimizer.load_state_dict(saved)
        whole(x)
        continued(x)
        torch.testing.assert_close(again.w.detach(), model.w.detach())

    def test_scalars_cannot_be_grouped(self):
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica"):
            poptorch.inferenceModel(model).w.replicaGrouping(
                poptorch.CommGroupType.NoGrouping, 1, poptorch.VariableRetrievalMode.OnePerGroup
            )
