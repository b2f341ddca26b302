"""Batch norms of groups train as one batch of each group does, in every way replicas run."""

from __future__ import annotations

import threading

import pytest
import torch
from poptorch.group_norms import group_models
from poptorch.group_norms.group_models import (
    MODELS,
    Classifier,
    by_hand,
    distance,
    model_and_data,
    options_for,
    trained,
)
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.group_norms import statistics_exchange

SETTER = "distributedBatchNormReplicaGroupSize"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
WAYS = ("loop", "auto", "fused")
# Their forwards read a buffer in Python or run a part again, for which replicas take turns.
ONLY_LOOP = ("averaging", "recomputed")
sweep = pytest.mark.sweep


def assert_as_by_hand(name, size, how, accumulation=1, dtype=torch.float64):
    found = trained(name, options_for(size, 4, how, accumulation, dtype), dtype)
    state, scores = by_hand(name, 4, size, accumulation, dtype)
    assert distance(found.state, state) < TOLERANCE[dtype]
    assert (found.scores - scores).abs().max() < TOLERANCE[dtype]
    return found


@pytest.mark.parametrize(
    ("size", "how", "dtype"),
    [
        (2, "loop", torch.float64),
        (4, "loop", torch.float32),
        (4, "auto", torch.float64),
        (2, "auto", torch.float32),
        (4, "fused", torch.float64),
        (2, "fused", torch.float32),
    ],
)
def test_a_group_is_one_batch(size, how, dtype):
    found = assert_as_by_hand("residual", size, how, accumulation=2, dtype=dtype)
    assert found.back_end == ("loop" if how == "loop" else "fused graph")


@pytest.mark.parametrize("how", [pytest.param(how, marks=sweep) for how in WAYS])
@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("residual", "random", "half")])
def test_models_train_as_by_hand(name, how):
    if how == "fused" and name in ONLY_LOOP:
        with pytest.raises(poptorch.Error, match=r"replicaExecution\('fused'\) is not possible"):
            trained(name, options_for(2, 4, how))
        return
    found = assert_as_by_hand(name, 2, how)
    is_loop = how == "loop" or name in ONLY_LOOP
    assert found.back_end == ("loop" if is_loop else "fused graph")


@pytest.mark.parametrize("name", ["shared", "remembering", "recomputed", "no gradient"])
def test_models_train_as_by_hand_in_turns(name):
    assert_as_by_hand(name, 2, "loop")


def test_gradients_of_each_replica_are_its_own_while_backwards_take_turns():
    options = options_for(2, 4, accumulation=2, deterministic=True)
    found = trained("residual", options)
    state, _ = by_hand("residual", 4, 2, 2)
    assert distance(found.state, state) < 1e-12


@pytest.mark.parametrize("name", ["random", "half"])
def test_random_numbers_and_halves_are_the_same_in_turns_and_at_once(name):
    loop, fused = (trained(name, options_for(2, 4, how), torch.float32) for how in WAYS[::2])
    near = 1e-5 if name == "random" else 2e-3
    assert (loop.losses - fused.losses).abs().max() < near
    assert distance(fused.state, loop.state) < near


def test_a_replica_draws_the_same_numbers_as_without_groups():
    """Dropout beside a norm: only the statistics differ."""

    def dropped(size):
        torch.manual_seed(1)
        model = Classifier(nn.Flatten(), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Flatten())
        options = options_for(size, 4)
        weight = nn.Parameter(torch.ones(()))
        model.register_parameter("weight", weight)
        wrapped = poptorch.trainingModel(model, options, torch.optim.SGD([weight], lr=0.1))
        x = torch.randn(12, 32)
        return wrapped(x, torch.zeros(12, dtype=torch.int64))[0] == 0

    assert torch.equal(dropped(1), dropped(2))


def test_statistics_of_one_are_those_of_torch():
    plain = poptorch.Options().showCompilationProgressBar(False).Training
    assert plain.distributedBatchNormReplicaGroupSize(1).norm_group_size == 1
    found = trained("residual", options_for(1, 4))
    state, scores = by_hand("residual", 4, 1)
    assert distance(found.state, state) < 1e-12
    assert (found.scores - scores).abs().max() < 1e-12


@pytest.mark.parametrize("how", WAYS)
def test_a_micro_batch_may_have_one_value_for_each_channel(monkeypatch, how):
    monkeypatch.setattr(group_models, "MICRO_BATCH", 1)
    assert_as_by_hand("few", 2, how)


def test_anchored_operations_are_those_of_each_replica():
    """They are named by modules, the forwards of which replicas in turns have open at once."""
    anchored = {}
    for size in (1, 2):
        options = options_for(size, 2)
        for name in ("body/0/main/4/batch_norm", "body/2/linear", "Gradient___body.2.bias"):
            options.anchorTensor(name, name)
        model, x, y = model_and_data("residual", 6)
        wrapped = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0))
        scores, _ = wrapped(x[0], y[0])
        anchored[size] = {
            name: wrapped.getAnchoredTensor(name) for name in options.anchored_tensors
        }
        assert torch.equal(anchored[size]["body/2/linear"], scores)
    for name, alone in anchored[1].items():
        assert alone.shape == anchored[2][name].shape
        assert not torch.equal(alone, anchored[2][name])
    together = anchored[2]["body/0/main/4/batch_norm"]
    assert together.mean((0, 2, 3)).abs().max() < 1e-12


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -2, True, 2.0, "2", None])
def test_what_is_no_size_is_refused_by_the_setter(given):
    with pytest.raises(ValueError, match="expected a whole number, 1 or more") as caught:
        poptorch.Options().Training.distributedBatchNormReplicaGroupSize(given)
    assert str(caught.value).startswith(f"{SETTER}({given!r})")


def test_replicas_that_form_no_groups_are_refused_when_compiling():
    with pytest.raises(
        poptorch.Error, match=rf"{SETTER}\(3\): the 4 replicas.*a group size that divides"
    ):
        trained("few", options_for(3, 4))


def test_inference_takes_running_statistics():
    model = MODELS["images"]().eval()
    inference = poptorch.inferenceModel(model, options_for(3, 2))
    x = torch.randn(4, 2, 4, 4)
    y = torch.zeros(4, dtype=torch.int64)
    assert torch.allclose(inference(x, y)[0], model(x, y)[0])


class Uneven(nn.Module):
    """Runs a second norm, on one replica alone or of other channels there."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm1d(c) for c in (32, 32, 4))
        self.kind, self.calls = kind, []

    def forward(self, x, y):
        self.calls.append(None)
        is_odd = len(self.calls) % 2 == 0
        x = self.first(x.flatten(1))
        if self.kind == "missing" and is_odd:
            x = self.second(x)
        if self.kind == "other":
            x = self.third(x[:, :4]) if is_odd else self.second(x)
        return nn.functional.cross_entropy(x, y)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "replica 1 computes the batch norm of 32 channels \\(forward\\), but "
                    "local replica 0 computes no further"),
        ("other", "replica 0 computes the batch norm of 32 channels \\(forward\\), but "
                  "local replica 1 computes the batch norm of 4 channels \\(forward\\)"),
    ],
)  # fmt: skip
def test_replicas_that_run_other_norms_are_named_and_no_thread_stays(kind, text):
    before = threading.active_count()
    options = options_for(2, 2)
    model = Uneven(kind)
    wrapped = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(6, 2, 4, 4), torch.zeros(6, dtype=torch.int64)
    wrapped.compile(x, y)
    model.calls.clear()
    with pytest.raises(poptorch.Error, match=text):
        wrapped(x, y)
    assert threading.active_count() == before


def test_the_error_of_one_replica_is_raised_as_itself():
    class Failing(Uneven):
        def forward(self, x, y):
            result = super().forward(x, y)
            if len(self.calls) == 2:  # both have begun, and the first one goes on first
                raise LookupError("a replica")
            return result

    before = threading.active_count()
    model = Failing("")
    wrapped = poptorch.trainingModel(
        model, options_for(2, 2), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, y = torch.randn(6, 2, 4, 4), torch.zeros(6, dtype=torch.int64)
    wrapped.compile(x, y)
    model.calls.clear()
    with pytest.raises(LookupError, match="a replica"):
        wrapped(x, y)
    assert threading.active_count() == before


# -- the exchange ---------------------------------------------------------------------------------


class Two:
    """The communicator of the second of two instances."""

    num_instances, instance_index = 2, 1

    def all_gather(self, array, name):
        assert name == "a norm"
        import numpy as np

        return np.stack([array - 100, array])


def test_a_group_of_two_instances_has_the_numbers_in_the_order_of_replicas():
    rows = torch.arange(100.0, 103.0).unsqueeze(1)  # replicas 3 to 5 of 6
    groups = statistics_exchange.GroupExchange(2, 3, Two())
    told = statistics_exchange.OF_GROUP(rows, groups.handle, "a norm").squeeze(2)
    assert told.tolist() == [[2, 100], [101, 102], [101, 102]]
    with groups.alone():
        absent = statistics_exchange.OF_GROUP(rows, groups.handle, "a norm").squeeze(2)
    assert absent.tolist() == [[204, 100], [101, 102], [101, 102]]
