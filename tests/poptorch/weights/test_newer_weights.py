"""Whose weights are newer, the host's or the device's, and when they are copied."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, WithLoss, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch


def note_copies(wrapper, name, copies):
    """Append to ``copies`` what is copied between the host and the device of a wrapper."""
    weights, state = wrapper._weights, wrapper._compiled.state
    download, upload = weights._download, state.upload
    weights._download = lambda: (copies.append(f"{name} to host"), download())
    state.upload = lambda: (copies.append(f"host to {name}"), upload())


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

    def test_wrappers_of_one_module_copy_once_for_each_change(self, caplog):
        model, training = trained()
        inference = poptorch.inferenceModel(model, quiet_options())
        x, y = classified(4)
        copies = []

        def copied():
            """Return what was copied since the last time."""
            now, copies[:] = list(copies), []
            return now

        for name, wrapper in (("training", training), ("inference", inference)):
            wrapper.compile(x, *([y] if wrapper is training else []))
            note_copies(wrapper, name, copies)
        inference(x)
        inference(x)
        assert copied() == []
        poptorch.setLogLevel("DEBUG")
        try:
            training(x, y)
            training(x, y)
            assert copied() == []
            inference(x)
            assert copied() == ["training to host", "host to inference"]
            inference(x)
            model.state_dict()
            model.layers[0].weight.sum()
            training.copyWeightsToHostIfNeeded()
            assert copied() == []
            training(x, y)
            model.layers[0].weight.sum()
            assert copied() == ["training to host"]
            inference(x)
            inference(x)
            assert copied() == ["host to inference"]
        finally:
            poptorch.setLogLevel("WARN")
        texts = [record.getMessage() for record in caplog.records]
        assert texts.count("Implicit copyWeightsToHost()") == 2
        assert texts.count("Implicit copyWeightsToDevice()") == 2

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

    def test_two_trainers_of_an_adversarial_pair_keep_what_each_trains(self):
        class Judging(nn.Module):
            def __init__(self):
                super().__init__()
                self.generator, self.judge = generator, judge

            def forward(self, noise, real=None):
                fake = self.judge(self.generator(noise))
                if real is None:
                    return F.softplus(-fake).mean(), poptorch.identity_loss(-fake, "mean")
                return poptorch.identity_loss(fake - self.judge(real), "mean")

        torch.manual_seed(0)
        generator, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        judge.append(nn.Linear(3, 1))
        before = copy.deepcopy((generator, judge))
        trainers = [
            poptorch.trainingModel(
                Judging(), quiet_options(), torch.optim.SGD(part.parameters(), lr=0.1)
            )
            for part in (judge, generator)
        ]
        noise, real = torch.randn(6, 4), torch.randn(6, 2)
        trainers[0].compile(noise, real)
        trainers[1].compile(noise)
        for _ in range(2):
            trainers[0](noise, real)
            trainers[1](noise)
        assert not torch.equal(generator.weight, before[0].weight)
        assert not torch.equal(judge[0].weight, before[1][0].weight)
        # Only what a program asks for copies all that a trainer has.
        trainers[1].copyWeightsToHost()
        assert torch.equal(judge[0].weight, before[1][0].weight)
        # A device gets what the other trainer learnt, although nobody has read it yet.
        trainers[0](noise, real)
        trainers[1].copyWeightsToDevice()
        device = trainers[1]._compiled.state.parameters["judge.0.weight"]
        assert not torch.equal(device, before[1][0].weight)
        assert torch.equal(device, trainers[0]._compiled.state.parameters["judge.0.weight"])

    def test_another_optimiser_leaves_what_the_first_one_trained(self):
        model, training = trained()
        x, y = classified(4)
        training.setOptimizer(torch.optim.SGD(model.layers[0].parameters(), lr=0.1))
        before = copy.deepcopy(model.state_dict())
        training(x, y)
        training.setOptimizer(torch.optim.SGD(model.layers[2].parameters(), lr=0.1))
        training(x, y)
        now = model.state_dict()
        assert not any(torch.equal(now[name], before[name]) for name in now)

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

    def test_an_optimizer_of_a_copy_is_told(self, caplog):
        model = Mlp()
        before = copy.deepcopy(model.state_dict())
        for source in (model, copy.deepcopy(model)):
            assert not caplog.records
            optimizer = torch.optim.SGD(source.parameters(), lr=0.5)
            training = poptorch.trainingModel(model, quiet_options(), optimizer)
            training(*classified(4))
            training.destroy()
            if source is model:
                model.load_state_dict(before)
        assert "No parameter is trained: the loss does not depend" in caplog.text
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
