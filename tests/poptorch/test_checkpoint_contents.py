"""What a training's checkpoint can hold: refused when it is saved, not when it is needed."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import torch

from popdist_py import poptorch
from popdist_py.checkpoint import Checkpoints
from popdist_py.poptorch.checkpoint import TrainingCheckpoints


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self.layer(inputs), labels)


def training(lr=0.1):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=lr)
    return poptorch.trainingModel(model, options, optimizer=optimizer)


def trained(folder, lr=0.1):
    model = training(lr)
    model(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))
    return TrainingCheckpoints(folder, model)


@pytest.mark.parametrize("value", [np.float64(0.5), datetime.date(2020, 1, 1)], ids=repr)
def test_extra_that_could_not_be_loaded_is_refused(tmp_path, value):
    checkpoints = trained(tmp_path)
    with pytest.raises(poptorch.Error, match=r"extra\['best'\] holds more .* expected tensors"):
        checkpoints.save(1, {"best": value})
    assert not list(tmp_path.iterdir())


def test_numpys_floats_among_the_optimisers_settings_are_floats(tmp_path):
    trained(tmp_path, lr=np.float64(0.25)).save(1)
    model = training()
    TrainingCheckpoints(tmp_path, model).resume()
    assert model._link.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("data", [b"no training", b""])
def test_somebody_elses_checkpoint_is_refused(tmp_path, data):
    Checkpoints(tmp_path).save(5, data)
    with pytest.raises(poptorch.Error, match=r"step 5 in .* holds no training"):
        TrainingCheckpoints(tmp_path, training()).resume()
