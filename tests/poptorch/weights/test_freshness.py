"""Whose weights are newer, the host's or the device's, and when they are copied."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch


class TestWeights:
    def test_reading_fetches_once_and_only_when_needed(self, monkeypatch):
        model, training = trained()
        training.compile(*classified(4))
        fetched = []
        weights = training._weights
        download = weights._download
        monkeypatch.setattr(weights, "_download", lambda: (fetched.append(1), download()))
        before = model.layers[0].weight.tolist()
        training(*classified(4))
        training(*classified(4))
        assert not fetched
        assert model.layers[0].weight.tolist() != before
        model.state_dict()
        model(classified(4)[0])
        assert len(fetched) == 1
        assert not training.copyWeightsToHostIfNeeded()
        training(*classified(4))
        assert training.copyWeightsToHostIfNeeded()
        assert len(fetched) == 2

    def test_inference_follows_training(self):
        model, training = trained()
        inference = poptorch.inferenceModel(model, quiet_options())
        x, y = classified(4)
        before = inference(x)
        training(x, y)
        after = inference(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, copy.deepcopy(model)(x).detach())
        training(x, y)
        training.destroy()
        assert not torch.equal(inference(x), after)

    def test_changes_on_the_host_are_not_noticed(self):
        model = nn.Linear(2, 2)
        inference = poptorch.inferenceModel(model, quiet_options())
        x = torch.ones(1, 2)
        before = inference(x)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        assert torch.equal(inference(x), before)
        inference.copyWeightsToDevice()
        assert inference(x).tolist() == [[0, 0]]

    def test_copies_and_pickles_are_plain(self):
        model, training = trained()
        training(*classified(4))
        for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(duplicate) is Mlp
            assert type(duplicate.layers[0].weight) is nn.Parameter
            assert torch.equal(duplicate.layers[0].weight, model.layers[0].weight.detach())
            duplicate(classified(4)[0])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert torch.equal(torch.load(file)["layers.0.bias"], model.layers[0].bias.detach())

    @pytest.mark.parametrize("first", [0, 1])
    def test_models_that_are_wrapped_apart_may_share_a_module(self, first):
        shared = nn.Linear(6, 4)
        models = [WithLoss(nn.Sequential(shared, nn.Linear(4, 2))) for _ in range(2)]
        wrappers = [trained(model)[1] for model in models]
        x = torch.randn(3, 6)
        for turn in (first, 1 - first):
            before = shared.weight.detach().clone()
            wrappers[turn](x, torch.zeros(3, 2))
            assert not torch.equal(shared.weight, before), "read from the one that trained last"
        wrappers[first].destroy()
        before = shared.weight.detach().clone()
        wrappers[1 - first](x, torch.zeros(3, 2))
        assert not torch.equal(shared.weight, before)
        wrappers[1 - first].destroy()
        assert type(shared.weight) is type(models[first].model[1].weight) is nn.Parameter

    def test_loading_a_state_uploads_it(self):
        model, training = trained()
        x, y = classified(4)
        state = copy.deepcopy(model.state_dict())
        first = training(x, y)[1]
        training(x, y)
        result = training.load_state_dict({**state, "more": torch.ones(1)}, strict=False)
        assert result.unexpected_keys == ["more"]
        torch.testing.assert_close(training(x, y)[1], first)
        assert list(training.state_dict()) == list(state)

    def test_tied_and_frozen_parameters(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
                self.b.weight = self.a.weight
                self.b.bias.requires_grad_(False)

            def forward(self, x):
                return poptorch.identity_loss(self.b(self.a(x)), "sum")

        model = Tied()
        bias = model.b.bias.clone()
        _, training = trained(model)
        training(torch.ones(1, 3))
        assert model.a.weight is model.b.weight
        assert torch.equal(model.b.bias, bias)

    def test_parameters_outside_the_optimizer_stay(self):
        model = Mlp()
        training = poptorch.trainingModel(
            model, quiet_options(), torch.optim.SGD(model.layers[2].parameters(), lr=0.5)
        )
        before = copy.deepcopy(model.state_dict())
        training(*classified(4))
        now = model.state_dict()
        assert torch.equal(now["layers.0.weight"], before["layers.0.weight"])
        assert not torch.equal(now["layers.2.weight"], before["layers.2.weight"])
