"""The counters of the heartbeat for training steps and for other calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.models import Mlp, classified, quiet_options

from popdist_py import activities, heartbeat, poptorch
from popdist_py.environment import BETWEEN_CALLS, COMPILING, INFERENCE, TRAINING
from popdist_py.poptorch.checkpoint import TrainingCheckpoints


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """Give each test counters of its own."""
    monkeypatch.setattr(heartbeat, "_words", None)
    return heartbeat._open()


def counted(words):
    """Return the steps, the calls since the last step, the resumed step, and the activity."""
    return [
        words[word]
        for word in (heartbeat._STEP, heartbeat._CALLS, heartbeat._RESUMED, heartbeat._DOING)
    ]


def test_other_calls_are_counted_apart_and_from_the_last_step_on(words):
    heartbeat.step()
    heartbeat.call()
    heartbeat.call()
    assert counted(words) == [1, 2, 0, BETWEEN_CALLS]
    heartbeat.enter(TRAINING)
    assert counted(words) == [1, 2, 0, TRAINING]
    heartbeat.step()
    assert counted(words) == [2, 0, 0, BETWEEN_CALLS]
    assert heartbeat.steps() == 2


def test_counting_goes_on_from_the_step_that_was_resumed(words):
    heartbeat.step()
    heartbeat.call()
    heartbeat.resume(20)
    assert counted(words) == [20, 0, 20, BETWEEN_CALLS]
    heartbeat.step()
    assert heartbeat.steps() == 21
    assert counted(words) == [21, 0, 20, BETWEEN_CALLS]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError)])
def test_what_is_no_number_of_steps_is_refused(words, step, error):
    with pytest.raises(error, match="expected the number of training steps done"):
        heartbeat.resume(step)
    assert counted(words) == [0, 0, 0, BETWEEN_CALLS]


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (None, None),
        (0.25, 0.25),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.array([2.0]), 2.0),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([[1.5]]).half(), 1.5),
        (math.inf, math.inf),
    ],
)
def test_a_step_takes_any_one_number_as_its_loss(words, monkeypatch, loss, number):
    told = []
    monkeypatch.setattr(activities, "step_done", lambda *values: told.append(values))
    heartbeat.step(4, loss=loss)
    assert told == [(4, number, 1)]


@pytest.mark.parametrize(
    "loss", ["0.5", b"1", [0.5], torch.zeros(2), np.zeros(3), {}, 1j, 10**400, torch.nn.ReLU()]
)
def test_what_is_not_one_number_is_no_loss_and_counts_nothing(words, loss):
    with pytest.raises(TypeError, match=r"^loss=.{1,80}: expected one number, or a tensor of one"):
        heartbeat.step(loss=loss)
    assert heartbeat.steps() == 0


def make_models(device_iterations=1):
    options = quiet_options().deviceIterations(device_iterations)
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer), poptorch.inferenceModel(
        model, options
    )


def test_calls_of_a_training_model_are_steps_and_others_are_not(words):
    training, inference = make_models(device_iterations=2)
    inputs, labels = classified(4)
    seen = []
    training.model.register_forward_hook(lambda *_: seen.append(words[heartbeat._DOING]))
    training.compile(inputs, labels)
    assert COMPILING in seen
    assert counted(words) == [0, 0, 0, BETWEEN_CALLS]
    for _ in range(3):
        training(inputs, labels)
    assert counted(words) == [3, 0, 0, BETWEEN_CALLS]  # a call is a step, at any device iterations
    inference(inputs)
    inference(inputs)
    assert counted(words) == [3, 2, 0, BETWEEN_CALLS]


def test_a_call_that_fails_was_in_that_step(words):
    training, inference = make_models()
    inputs, labels = classified(4)
    for model, arguments, kind in ((training, (inputs, labels), TRAINING),
                                   (inference, (inputs,), INFERENCE)):  # fmt: skip
        model(*arguments)
        before = counted(words)[:2]
        model._compiled.program.run = None
        with pytest.raises(TypeError):
            model(*arguments)
        assert counted(words) == [*before, 0, kind]


def test_resuming_a_training_resumes_its_count(words, tmp_path):
    training, _ = make_models()
    inputs, labels = classified(4)
    checkpoints = TrainingCheckpoints(tmp_path, training)
    assert checkpoints.resume() == (0, {})
    for _ in range(3):
        training(inputs, labels)
    checkpoints.save(24)
    training(inputs, labels)
    assert checkpoints.resume() == (24, {})
    assert heartbeat.steps() == 24
    training(inputs, labels)
    assert counted(words) == [25, 0, 24, BETWEEN_CALLS]
