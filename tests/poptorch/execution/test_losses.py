"""Which result is the loss, and what identity_loss makes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch


class TestLosses:
    @pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
    def test_identity_loss(self, reduction):
        x = torch.tensor([1.0, 3.0])
        expected = {"sum": 4, "mean": 2, "none": [1, 3]}[reduction]
        assert poptorch.identity_loss(x, reduction).tolist() == expected
        with pytest.raises(AssertionError, match="Unsupported reduction"):
            poptorch.identity_loss(x, "max")

    def test_a_loss_is_needed_and_one_only(self):
        class NoLoss(Mlp):
            def forward(self, x):
                return self.layers(x)

        class Two(Mlp):
            def forward(self, x):
                out = self.layers(x)
                return F.mse_loss(out, out * 2), F.l1_loss(out, out * 2)

        with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
            trained(NoLoss())[1](classified(2)[0])
        with pytest.raises(poptorch.Error, match=r"Multiple independent losses.*identity_loss"):
            trained(Two())[1](classified(2)[0])

    def test_a_model_without_parameters_needs_a_loss(self):
        class Plain(nn.Module):
            def forward(self, x):
                return poptorch.identity_loss(x, "mean")

        assert poptorch.trainingModel(Plain(), quiet_options())(torch.ones(2)).item() == 1
