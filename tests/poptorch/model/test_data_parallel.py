"""nn.DataParallel inside and around a wrapper runs as one device, and a warning says so."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch.model import wrap


@pytest.fixture
def log(caplog):
    wrap._say_one_device.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def _training(model, module):
    return poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(module.parameters(), lr=0.1)
    )


def test_a_module_in_data_parallel_trains_as_the_plain_one(log):
    plain = Mlp()
    inside, around = copy.deepcopy(plain), copy.deepcopy(plain)
    wrappers = (
        _training(plain, plain),
        _training(nn.DataParallel(inside, device_ids=[0, 1]), inside),
        _training(around, around),
    )
    models = (*wrappers[:2], nn.DataParallel(wrappers[2], device_ids=[0, 1]))
    batch = classified(8)
    losses = [[model(*batch)[1].item() for _ in range(3)] for model in models]
    assert losses[0] == losses[1] == losses[2]
    for wrapper in wrappers:
        wrapper.copyWeightsToHost()
    for module in (inside, around):
        for own, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, expected)
    (message,) = log.messages
    assert message.startswith("nn.DataParallel has no effect on emulated IPUs")
    assert "Options.replicationFactor(n)" in message


def test_inference_in_data_parallel_is_that_of_the_plain_one_and_the_line_comes_once(log):
    model = nn.Linear(4, 3)
    images = torch.rand(8, 4)
    expected = poptorch.inferenceModel(model, quiet_options())(images)
    for _ in range(2):
        inference = poptorch.inferenceModel(nn.DataParallel(model), quiet_options())
        assert torch.equal(inference(images), expected)
    assert len(log.messages) == 1
