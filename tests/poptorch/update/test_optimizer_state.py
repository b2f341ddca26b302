"""The state of optimisers: names and values, saved, loaded, and carried into another model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.models import (
    Mlp,
    assert_equal_weights,
    classified,
    quiet_options,
    reference_steps,
    steps,
)

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import optim


class TestState:
    def test_names_and_values(self):
        model = Mlp()
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        assert optimizer.state_dict()["ipu_state"] is None
        training = steps(model, optimizer, 2)
        state = optimizer.state_dict()
        assert list(state) == ["ipu_state", "ipu_param", "state", "param_groups"]
        assert state["ipu_state"]["Step___layers.0.weight"] == 2
        assert state["ipu_state"]["Accl1___layers.0.weight"].shape == (8, 6)
        assert state["ipu_param"]["lossScaling_FLOAT"] == 1
        assert state["ipu_param"]["learningRate___specific___layers.0.bias"].item() == (
            pytest.approx(0.1)
        )
        assert training.isCompiled()

    def test_settings_of_sgd_are_scaled(self):
        model = Mlp()
        optimizer = optim.SGD(
            model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1, loss_scaling=2.0
        )
        steps(model, optimizer, 1)
        settings = optimizer.state_dict()["ipu_param"]
        name = "layers.0.weight"
        assert settings[f"scaledLearningRate0___specific___{name}"].item() == 0.25
        assert settings[f"weightDecayScaleFactor0___specific___{name}"].item() == pytest.approx(
            0.95
        )

    @pytest.mark.parametrize("compiled", [True, False])
    def test_training_continues_from_a_loaded_state(self, compiled):
        torch.manual_seed(0)
        model = Mlp()
        whole = copy.deepcopy(model)
        steps(whole, optim.Adam(whole.parameters(), lr=0.1), 4)
        first = optim.Adam(model.parameters(), lr=0.1)
        steps(model, first, 2)
        saved = copy.deepcopy(first.state_dict())
        weights = copy.deepcopy(model.state_dict())
        again = Mlp()
        again.load_state_dict(weights)
        optimizer = optim.Adam(again.parameters(), lr=0.1)
        training = poptorch.trainingModel(again, quiet_options(), optimizer)
        if compiled:
            training.compile(*classified(8))
        optimizer.load_state_dict(saved)
        for step in (2, 3):
            training(*classified(8, seed=step))
        assert_equal_weights(again, whole)

    @pytest.mark.parametrize("new_wrapper", [True, False])
    def test_a_model_that_is_compiled_again_keeps_its_state(self, new_wrapper):
        torch.manual_seed(0)
        model = Mlp()
        reference = copy.deepcopy(model)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = steps(model, optimizer, 3)
        training.destroy()
        if new_wrapper:
            steps(model, optimizer, 2)
        else:
            for step in range(2):
                training(*classified(8, seed=step))
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        reference_steps(reference, theirs, 3)
        reference_steps(reference, theirs, 2)
        assert_equal_weights(model, reference)

    @pytest.mark.parametrize(
        ("kind", "arguments"),
        [
            (optim.SGD, {"momentum": 0.9}),
            (optim.AdamW, {}),
            (optim.LAMB, {}),
            (optim.LARS, {"momentum": 0.9}),
            (optim.RMSprop, {"momentum": 0.5, "centered": True}),
            (optim.RMSprop, {"momentum": 0.5, "use_tf_variant": True}),
        ],
    )
    def test_every_state_can_be_loaded_into_a_new_model(self, kind, arguments):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = kind(model.parameters(), lr=0.01, **arguments)
        training = steps(model, optimizer, 2)
        again = copy.deepcopy(model)
        other = kind(again.parameters(), lr=0.01, **arguments)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        continued = poptorch.trainingModel(again, quiet_options(), other)
        for wrapper in (training, continued):
            wrapper(*classified(8, seed=2))
        assert_equal_weights(again, model)

    @pytest.mark.parametrize("of_torch", [False, True])
    def test_a_new_optimizer_of_the_same_kind_goes_on_with_the_state(self, of_torch):
        kind = torch.optim.Adam if of_torch else optim.Adam
        torch.manual_seed(0)
        model = Mlp()
        reference = copy.deepcopy(model)
        training = poptorch.trainingModel(model, quiet_options(), kind(model.parameters(), lr=0.1))
        theirs = torch.optim.Adam(reference.parameters(), lr=0.1)
        for step, rate in enumerate((0.1, 0.05, 0.01)):
            training.setOptimizer(kind(model.parameters(), lr=rate))
            training(*classified(8, seed=step))
            theirs.param_groups[0]["lr"] = rate
            theirs.zero_grad()
            reference(*classified(8, seed=step))[1].backward()
            theirs.step()
        assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)

    def test_an_optimizer_that_comes_back_brings_its_state(self):
        model = Mlp()
        first = optim.Adam(model.parameters(), lr=0.1)
        training = steps(model, first, 2)
        training.setOptimizer(optim.SGD(model.parameters(), lr=0.1))
        training(*classified(8))
        training.setOptimizer(first)
        training(*classified(8))
        assert first.state_dict()["ipu_state"]["Step___layers.0.bias"] == 3

    def test_other_groups_and_new_momentum_keep_the_state(self):
        model = Mlp()
        optimizer = optim.RMSprop(model.parameters(), lr=0.1)
        optimizer.variable_attrs.markAsVariable("momentum")
        training = steps(model, optimizer, 1)
        before = optimizer.state_dict()["ipu_state"]["Accl1___layers.0.bias"].clone()
        optimizer.param_groups[0]["momentum"] = 0.5
        training.setOptimizer(optimizer)
        groups = [{"params": layer.parameters()} for layer in (model.layers[0], model.layers[2])]
        optimizer = optim.RMSprop(groups, lr=0.1, momentum=0.5)
        training.setOptimizer(optimizer)
        state = optimizer.state_dict()["ipu_state"]
        assert torch.equal(state["Accl1___layers.0.bias"], before)
        training(*classified(8))
        state = optimizer.state_dict()["ipu_state"]
        assert state["Accl2___layers.2.bias"].any()
        assert not torch.equal(state["Accl1___layers.0.bias"], before)

    def test_what_cannot_be_loaded(self):
        optimizer = optim.SGD(Mlp().parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="because it is empty"):
            optimizer.load_state_dict({})
        with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
            optimizer.load_state_dict(torch.optim.SGD(Mlp().parameters(), lr=1.0).state_dict())

    def test_pickles_keep_everything(self):
        model = Mlp()
        optimizer = optim.Adam(model.parameters(), lr=0.1, loss_scaling=3.0)
        optimizer.note = "mine"
        steps(model, optimizer, 1)
        duplicate = pickle.loads(pickle.dumps(optimizer))
        assert (duplicate.note, duplicate.loss_scaling) == ("mine", 3.0)
        assert duplicate.state_dict()["ipu_state"]["Step___layers.0.bias"] == 1
