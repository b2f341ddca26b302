"""Optimisers: arithmetic against torch.optim and the stated formulas, attributes, and state."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.models import (
    Mlp,
    WithLoss,
    assert_equal_weights,
    classified,
    quiet_options,
    reference_steps,
    steps,
)
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import optim

PAIRS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    ),
    "sgd nesterov": (optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (
        optim.AdamW,
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    ),
    "rmsprop": (
        optim.RMSprop,
        torch.optim.RMSprop,
        {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.01},
    ),
    "plain torch": (torch.optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_fifty_steps_as_torch(name):
    ours, theirs, arguments = PAIRS[name]
    torch.manual_seed(0)
    model = Mlp()
    reference = copy.deepcopy(model)
    steps(model, ours(model.parameters(), **arguments), 50)
    reference_steps(reference, theirs(reference.parameters(), **arguments), 50)
    assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)


def test_groups_keep_their_own_settings():
    model = Mlp()
    reference = copy.deepcopy(model)

    def groups(m):
        return [
            {"params": m.layers[0].parameters(), "lr": 0.5},
            {"params": m.layers[2].parameters(), "momentum": 0.9},
        ]

    steps(model, optim.SGD(groups(model), lr=0.1, use_combined_accum=True), 5)
    reference_steps(reference, torch.optim.SGD(groups(reference), lr=0.1), 5)
    assert_equal_weights(model, reference)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_have_dense_gradients(kind):
    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.words = kind(6, 4, sparse=sparse)

        def forward(self, x, y):
            out = self.words(x).reshape(len(x), -1, 4).sum(1)
            return out, nn.functional.cross_entropy(out, y)

    torch.manual_seed(0)
    model, reference = Words(sparse=True), Words(sparse=False)
    reference.load_state_dict(model.state_dict())
    x, y = torch.tensor([[1, 2], [0, 3]]), torch.tensor([1, 2])
    training = poptorch.trainingModel(
        model, quiet_options(), optim.Adam(model.parameters(), lr=0.1)
    )
    training(x, y)
    reference(x, y)[1].backward()
    torch.optim.Adam(reference.parameters(), lr=0.1).step()
    assert_equal_weights(model, reference)


def test_tensorflow_rmsprop():
    model = WithLoss(nn.Linear(2, 1, bias=False))
    weight = model.model.weight.detach().clone()
    optimizer = optim.RMSprop(
        model.parameters(), lr=0.1, alpha=0.9, eps=0.01, momentum=0.5, use_tf_variant=True
    )
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    square, buffer = torch.ones(1, 2), torch.zeros(1, 2)
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    for _ in range(3):
        gradient = 2 * (x @ weight.T - y) * x
        square = 0.9 * square + 0.1 * gradient**2
        buffer = 0.5 * buffer + 0.1 * gradient / (square + 0.01).sqrt()
        weight = weight - buffer
        training(x, y)
    torch.testing.assert_close(model.model.weight.detach(), weight)


@pytest.mark.parametrize("correction", [True, False])
def test_lamb_follows_its_formula_and_its_own_step(correction):
    torch.manual_seed(0)
    model = Mlp()
    arguments = {"lr": 0.05, "weight_decay": 0.1, "bias_correction": correction}
    reference, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    steps(model, optim.LAMB(model.parameters(), **arguments), 5)
    reference_steps(reference, optim.LAMB(reference.parameters(), **arguments), 5)
    assert_equal_weights(model, reference)
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in by_hand.parameters()}
    for step in range(1, 6):
        by_hand.zero_grad()
        by_hand(*classified(8, seed=step - 1))[1].backward()
        for p, (m, v) in state.items():
            with torch.no_grad():
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                c1, c2 = (1 - 0.9**step, 1 - 0.999**step) if correction else (1, 1)
                update = (m / c1) / ((v / c2).sqrt() + 1e-8) + 0.1 * p
                trust = 1.0 if not p.norm() or not update.norm() else p.norm() / update.norm()
                p.sub_(0.05 * trust * update)
    assert_equal_weights(model, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adamw_without_bias_correction_follows_its_formula(maximize, dtype):
    model = WithLoss(nn.Linear(2, 1, bias=False)).to(dtype)
    weight = model.model.weight.detach().float()
    optimizer = optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, maximize=maximize,
        bias_correction=False,
    )  # fmt: skip
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    first, second = torch.zeros(1, 2), torch.zeros(1, 2)
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    for _ in range(3):
        gradient = 2 * (x @ weight.T - y) * x * (-1 if maximize else 1)
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * first / (second.sqrt() + 1e-8)
        training(x.to(dtype), y.to(dtype))
    tolerance = {} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 3e-3}
    torch.testing.assert_close(model.model.weight.detach().float(), weight, **tolerance)
    assert optimizer.state_dict()["ipu_state"]["Step___model.weight"] == 3


def test_bias_correction_can_be_switched_after_compiling():
    """The next call has the other update rule, with the same moments."""
    weights = []
    for switched in (False, True):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = optim.AdamW(model.parameters(), lr=0.01, bias_correction=not switched)
        training = poptorch.trainingModel(model, quiet_options(), optimizer)
        training(*classified(4))
        first = copy.deepcopy(dict(model.named_parameters()))
        optimizer.bias_correction = not optimizer.bias_correction
        training.setOptimizer(optimizer)
        training(*classified(4))
        weights.append((first["layers.0.weight"], model.layers[0].weight.detach()))
    (one, then), (other, then_other) = weights
    assert not torch.equal(one, other)
    assert not torch.equal(then, then_other)
    torch.manual_seed(0)
    model = Mlp()
    steps(model, optim.AdamW(model.parameters(), lr=0.01), 2)
    assert not torch.equal(model.layers[0].weight, then)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_gradients_are_clipped_before_the_update(kind):
    model = Mlp()
    reference = copy.deepcopy(model)
    steps(model, kind(model.parameters(), lr=0.1, max_grad_norm=0.01, loss_scaling=16.0), 4)
    optimizer = kind(reference.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        reference(*classified(8, seed=step))[1].backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        kind.__mro__[2].step(optimizer)
    assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)


def test_loss_scaling_changes_neither_loss_nor_weights():
    model = Mlp()
    reference = copy.deepcopy(model)
    x, y = classified(8)
    scaled = poptorch.trainingModel(
        model, quiet_options(), optim.SGD(model.parameters(), lr=0.1, loss_scaling=1024.0)
    )
    plain = poptorch.trainingModel(
        reference, quiet_options(), optim.SGD(reference.parameters(), lr=0.1)
    )
    torch.testing.assert_close(scaled(x, y)[1], plain(x, y)[1])
    assert_equal_weights(model, reference)


class TestAttributes:
    def test_what_was_given_is_variable(self):
        optimizer = optim.SGD(Mlp().parameters(), lr=0.1, momentum=0.9)
        attributes = optimizer.variable_attrs
        assert not attributes.isConstant("lr")
        assert not attributes.isConstant("momentum")
        assert attributes.isConstant("loss_scaling")
        attributes.markAsVariable("loss_scaling")
        attributes.markAsConstant("momentum")
        assert not attributes.isConstant("loss_scaling")
        assert attributes.isConstant("momentum")
        with pytest.raises(AssertionError, match="The optimizer has no attribute speed"):
            attributes.isConstant("speed")

    def test_constants_stay(self):
        model = Mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, loss_scaling=2.0)
        training = steps(model, optimizer, 1)
        optimizer.loss_scaling = 4.0
        optimizer.param_groups[0]["lr"] = 0.2
        training.setOptimizer(optimizer)
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(poptorch.Error, match="momentum of group 0"):
            training.setOptimizer(optimizer)

    def test_the_learning_rate_can_be_made_constant(self):
        model = Mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        optimizer.variable_attrs.markAsConstant("lr")
        training = steps(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.raises(poptorch.Error, match="lr of group 0"):
            training.setOptimizer(optimizer)

    def test_defaults_of_torch_optimizers_stay(self):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        training = steps(model, optimizer, 1)
        optimizer.param_groups[0].update(lr=0.2, momentum=0.9)
        training.setOptimizer(optimizer)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with pytest.raises(poptorch.Error, match="weight_decay of group 0"):
            training.setOptimizer(optimizer)

    def test_automatic_loss_scaling_makes_the_scale_variable(self):
        model = Mlp()
        options = quiet_options()
        options.Training.setAutomaticLossScaling(True)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options, optimizer)
        training(*classified(4))
        assert not optimizer.variable_attrs.isConstant("loss_scaling")
        optimizer.loss_scaling = 4.0
        training.setOptimizer(optimizer)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_another_optimizer_may_train_other_parameters(self, deterministic):
        model = Mlp()
        reference = copy.deepcopy(model)
        options = quiet_options().replicationFactor(2)
        options.Emulator.deterministicReduction(deterministic)
        training = poptorch.trainingModel(
            model, options, optim.SGD(model.layers[0].parameters(), lr=0.1)
        )
        training(*classified(8, seed=0))
        training.setOptimizer(optim.Adam(model.layers[2].parameters(), lr=0.1))
        for step in (1, 2):
            training(*classified(8, seed=step))
        first = torch.optim.SGD(reference.layers[0].parameters(), lr=0.1)
        second = torch.optim.Adam(reference.layers[2].parameters(), lr=0.1)
        for step, optimizer in enumerate((first, second, second)):
            reference.zero_grad()
            reference(*classified(8, seed=step))[1].backward()
            optimizer.step()
        assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)

    def test_inference_models_have_none(self):
        model = Mlp()
        inference = poptorch.inferenceModel(model, quiet_options())
        with pytest.raises(poptorch.Error, match="for training models"):
            inference.setOptimizer(optim.SGD(model.parameters(), lr=0.5))

    def test_learning_rate_schedulers(self):
        model = Mlp()
        reference = copy.deepcopy(model)
        ours = optim.SGD(model.parameters(), lr=0.5)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
        training = poptorch.trainingModel(model, quiet_options(), ours)
        for step in range(3):
            training(*classified(8, seed=step))
            theirs.zero_grad()
            reference(*classified(8, seed=step))[1].backward()
            theirs.step()
            for schedule in schedules:
                with warnings.catch_warnings(action="error"):  # that step() was not called
                    schedule.step()
            training.setOptimizer(ours)
        assert_equal_weights(model, reference)

    def test_unexpected_attributes_are_reported_once(self, caplog):
        model = Mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        optimizer.known_from_the_start = 1
        training = steps(model, optimizer, 1)
        assert not caplog.records
        optimizer.surprise = 1
        optimizer.param_groups[0]["extra"] = 2
        for _ in range(2):
            training.setOptimizer(optimizer)
        texts = [record.getMessage() for record in caplog.records]
        assert texts == [
            "Ignoring unexpected optimizer attribute in SGD optimizer: ['surprise']",
            "Ignoring unexpected group 0 attribute in SGD optimizer: ['extra']",
        ]

    @pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.RMSprop, optim.LAMB, optim.LARS])
    def test_what_loading_a_state_adds_is_expected(self, make, caplog):
        model = Mlp()
        optimizer = make(model.parameters(), lr=0.1)
        training = steps(model, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        training.setOptimizer(optimizer)
        assert not caplog.records

    @pytest.mark.parametrize(
        ("make", "error", "text"),
        [
            (lambda p: torch.optim.Adagrad(p), AssertionError, "Unsupported optimizer type"),
            (lambda p: optim.Adam(p, amsgrad=True), ValueError, "amsgrad"),
            (lambda p: optim.SGD(p, lr=1, accum_type=torch.int8), AssertionError, "must be either"),
        ],
    )
    def test_what_is_not_supported(self, make, error, text):
        model = Mlp()
        with pytest.raises(error, match=text):
            poptorch.trainingModel(model, quiet_options(), make(model.parameters()))

    def test_subclasses_run_their_parent(self, caplog):
        class Mine(torch.optim.SGD):
            def step(self, closure=None):
                raise RuntimeError("not on the device")

        model = Mlp()
        steps(model, Mine(model.parameters(), lr=0.1), 1)
        assert "Mine is a subclass of SGD" in caplog.text

    def test_plain_adamw_is_no_subclass(self, caplog):
        model = Mlp()
        steps(model, torch.optim.AdamW(model.parameters()), 1)
        assert not caplog.records

    def test_half_accumulators_keep_a_running_mean(self):
        strategy = poptorch.MeanReductionStrategy
        model = Mlp()
        training = steps(model, optim.SGD(model.parameters(), lr=0.1), 1)
        name = "meanAccumulationAndReplicationReductionStrategy"
        assert training.options.Training(name) == strategy.Post
        half = optim.SGD(model.parameters(), lr=0.1, accum_type=torch.float16)
        with pytest.raises(ValueError, match="already compiled"):
            training.setOptimizer(half)
        training.destroy()
        other = poptorch.trainingModel(model, quiet_options(), half)
        assert other.options.Training(name) == strategy.Running

    def test_velocity_scaling_belongs_to_the_combined_accumulator(self, caplog):
        optim.SGD(Mlp().parameters(), lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
        assert "ignores velocity_scaling" not in caplog.text
        optim.SGD(Mlp().parameters(), lr=0.1, velocity_scaling=2.0)
        assert "ignores velocity_scaling" in caplog.text

    @pytest.mark.parametrize("later", [False, True])
    def test_the_other_variants_setting_of_a_group_is_ignored(self, caplog, later):
        model = Mlp()
        layers = [model.layers[0], model.layers[2]]
        groups = [{"params": list(layer.parameters())} for layer in layers]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(model, quiet_options(), optimizer)
        training(*classified(8))
        assert not caplog.records
        if later:
            optimizer.param_groups[1]["velocity_scaling"] = 3.0
        else:
            groups = [{"params": g["params"], "velocity_scaling": 3.0} for g in groups]
            optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        training.setOptimizer(optimizer)
        training.setOptimizer(optimizer)
        training(*classified(8))
        assert [record.message for record in caplog.records] == [optim.VELOCITY_SCALING_IGNORED]

    def test_a_constant_velocity_scaling_of_the_combined_variant_is_refused(self):
        model = Mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True)
        training = poptorch.trainingModel(model, quiet_options(), optimizer)
        training.compile(*classified(8))
        optimizer.param_groups[0]["velocity_scaling"] = 3.0
        with pytest.raises(poptorch.Error, match=r"velocity_scaling of group 0.*was the constant"):
            training.setOptimizer(optimizer)
