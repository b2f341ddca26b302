"""Which result is the loss, and what identity_loss makes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, WithLoss, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.tracing.losses import Losses

# Arguments of the losses that take other ones than two tensors of one shape.
_CLASSES = (torch.randn(2, 3), torch.tensor([0, 2]))
_ARGUMENTS = {
    "NLLLoss": _CLASSES,
    "NLLLoss2d": (torch.randn(2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.long)),
    "GaussianNLLLoss": (torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3)),
    "BCELoss": (torch.rand(2, 3), torch.rand(2, 3)),
    "MultiLabelMarginLoss": (torch.randn(2, 3), torch.tensor([[0, -1, 0], [1, 2, -1]])),
    "CrossEntropyLoss": _CLASSES,
    "LinearCrossEntropyLoss": _CLASSES,
    "CosineEmbeddingLoss": (torch.randn(2, 3), torch.randn(2, 3), torch.ones(2)),
    "MarginRankingLoss": (torch.randn(2), torch.randn(2), torch.ones(2)),
    "MultiMarginLoss": _CLASSES,
    "TripletMarginLoss": [torch.randn(2, 3) for _ in range(3)],
    "TripletMarginWithDistanceLoss": [torch.randn(2, 3) for _ in range(3)],
    "CTCLoss": (
        torch.randn(4, 1, 3).log_softmax(2),
        torch.ones(1, 2, dtype=torch.long),
        torch.tensor([4]),
        torch.tensor([2]),
    ),
}
_SETTINGS = {
    "KLDivLoss": {"reduction": "batchmean"},  # torch warns of the default one
    "LinearCrossEntropyLoss": {"in_features": 3, "num_classes": 3},
}


class TestLosses:
    @pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
    def test_identity_loss(self, reduction):
        x = torch.tensor([1.0, 3.0])
        expected = {"sum": 4, "mean": 2, "none": [1, 3]}[reduction]
        assert poptorch.identity_loss(x, reduction).tolist() == expected
        with pytest.raises(AssertionError, match=r"the reduction .* is not supported"):
            poptorch.identity_loss(x, "max")

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.parametrize("name", torch.nn.modules.loss.__all__)
    def test_every_loss_of_torch_is_a_loss(self, name):
        module = getattr(torch.nn.modules.loss, name)(**_SETTINGS.get(name, {}))
        arguments = _ARGUMENTS.get(name, (torch.randn(2, 3), torch.rand(2, 3).sign()))
        losses = Losses()
        with ForwardWatch(losses=losses).following():
            loss = module(*arguments)
        assert losses.final() is loss

    @pytest.mark.parametrize("execution", ["graph", "fused"])
    @pytest.mark.skipif(
        not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no such loss"
    )
    def test_a_loss_with_weights_trains_alike_in_every_back_end(self, execution):
        found = []
        for one in ("loop", execution):
            torch.manual_seed(0)
            model = WithLoss(nn.Linear(6, 8), nn.LinearCrossEntropyLoss(8, 4))
            options = quiet_options().replicationFactor(2).randomSeed(3)
            options.Emulator.set(replica_execution=one)
            training = poptorch.trainingModel(model, options)
            training(*classified(8))
            assert training._compiled.program.back_end.startswith(one)
            found.append([parameter.detach().clone() for parameter in model.parameters()])
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected)

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
