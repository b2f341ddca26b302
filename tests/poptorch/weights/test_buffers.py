"""Buffers: which last, which every replica has for itself, and which are sent."""

from __future__ import annotations

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


class TestBuffers:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.constant = torch.zeros(1)

        def forward(self, x):
            self.count += 1
            self.constant += 1
            return x + self.count, x + self.constant

    def test_buffers_last_and_plain_tensors_do_not(self):
        model = self.Counting()
        inference = poptorch.inferenceModel(model, quiet_options().deviceIterations(2))
        assert [t.tolist() for t in inference(torch.zeros(2))] == [[1, 2], [1, 1]]
        assert [t.tolist() for t in inference(torch.zeros(2))] == [[3, 4], [1, 1]]
        assert model.count.item() == 0
        inference.copyWeightsToHost()
        assert model.count.item() == 4

    def test_reading_after_training_shows_what_the_forward_changed(self):
        class Averaging(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2).half()
                self.register_buffer("average", torch.full((1,), 0.1))

            def forward(self, x):
                self.average += 0.1
                return poptorch.identity_loss(self.layer(x), "mean")

        model = Averaging()
        training = poptorch.trainingModel(model, quiet_options().deviceIterations(2))
        training(torch.ones(2, 2).half())
        # In its own format: nothing of it passed through half.
        torch.testing.assert_close(model.average, torch.full((1,), 0.3), rtol=1e-6, atol=0)
        training(torch.ones(2, 2).half())
        torch.testing.assert_close(model.state_dict()["average"], torch.full((1,), 0.5))

    @pytest.mark.parametrize("execution", ["loop", "fused"])
    def test_every_replica_has_its_own(self, execution):
        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.zeros(()))

            def forward(self, x):
                self.total += x.sum()
                return x + self.total

        model = Sums()
        options = quiet_options().replicationFactor(2)
        with pytest.raises(poptorch.Error, match="broadcastBuffers"):
            poptorch.inferenceModel(model, options.clone())(torch.zeros(2))
        options.broadcastBuffers(False).Emulator.replicaExecution(execution)
        inference = poptorch.inferenceModel(model, options)
        x = torch.tensor([1.0, 10.0])
        assert inference(x).tolist() == [2, 20]
        assert inference(x).tolist() == [3, 30]
        inference.copyWeightsToHost()
        assert model.total.item() == 2

    @pytest.mark.parametrize("how", ["reassign", "delete"])
    def test_buffers_stay_registered(self, how):
        class Loses(self.Counting):
            def forward(self, x):
                if how == "reassign":
                    self.count = self.count + 1
                else:
                    del self.count
                return x

        text = "was reassigned within the model" if how == "reassign" else "no longer exists"
        with pytest.raises(poptorch.Error, match=text):
            poptorch.inferenceModel(Loses(), quiet_options())(torch.zeros(1))

    def test_named_buffers_are_sent_alone(self):
        class Shift(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("a", torch.zeros(1))
                self.register_buffer("b", torch.zeros(1))

            def forward(self, x):
                return x + self.a + 10 * self.b

        model = Shift()
        options = quiet_options().updatableNamedBuffers(["a"])
        inference = poptorch.inferenceModel(model, options)
        inference(torch.zeros(1))
        model.a += 1
        model.b += 1
        inference.copyNamedBuffersToDevice()
        assert inference(torch.zeros(1)).item() == 1
        plain = poptorch.inferenceModel(model, quiet_options())
        plain(torch.zeros(1))
        with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
            plain.copyNamedBuffersToDevice()
        unknown = quiet_options().updatableNamedBuffers(["z"])
        with pytest.raises(poptorch.Error, match="z"):
            poptorch.inferenceModel(model, unknown)(torch.zeros(1))
