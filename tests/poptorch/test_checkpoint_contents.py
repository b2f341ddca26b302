"""What a training's checkpoint can hold: refused when it is saved, not when it is needed."""

from __future__ import annotations

import datetime
import io

import numpy as np
import pytest
import torch

from popdist_py import poptorch
from popdist_py.checkpoint import Checkpoints
from popdist_py.poptorch.checkpoint import TrainingCheckpoints, weights_of


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
    with pytest.raises(
        poptorch.Error, match=r"extra\['best'\] contains values .* Expected tensors"
    ):
        checkpoints.save(1, {"best": value})
    assert not list(tmp_path.iterdir())


class Tenth:
    """A rate as an object, whose attributes are in the scheduler's state."""

    def __init__(self, unit):
        self.unit = unit

    def __call__(self, updates):
        return 0.1**updates


@pytest.mark.parametrize("unit", ["update", datetime.timedelta(1)], ids=repr)
def test_a_scheduler_that_could_not_be_loaded_is_refused(tmp_path, unit):
    model = training()
    optimizer = model._link.optimizer
    model.setOptimizer(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, Tenth(unit)))
    model(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))
    checkpoints = TrainingCheckpoints(tmp_path, model)
    if unit == "update":
        checkpoints.save(1)
        assert checkpoints.resume()[0] == 1
        return
    with pytest.raises(poptorch.Error, match=r"state_dict\(\) of the scheduler contains values"):
        checkpoints.save(1)
    assert not list(tmp_path.iterdir())


def test_numpys_floats_among_the_optimisers_settings_are_floats(tmp_path):
    trained(tmp_path, lr=np.float64(0.25)).save(1)
    model = training()
    TrainingCheckpoints(tmp_path, model).resume()
    assert model._link.optimizer.param_groups[0]["lr"] == 0.25


def test_what_the_program_changed_of_the_optimiser_is_resumed(tmp_path):
    def made():
        net = Net()
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, loss_scaling=2.0)
        options = poptorch.Options().showCompilationProgressBar(False)
        return poptorch.trainingModel(net, options, optimizer), optimizer

    model, optimizer = made()
    batch = torch.ones(1, 2), torch.zeros(1, dtype=torch.long)
    model(*batch)
    optimizer.loss_scaling = 8.0
    model.setOptimizer(optimizer)
    TrainingCheckpoints(tmp_path, model).save(1)
    resumed, optimizer = made()
    TrainingCheckpoints(tmp_path, resumed).resume()
    resumed(*batch)
    assert optimizer.loss_scaling == 8.0
    assert resumed._compiled.program.training.loss_scale == 8.0


def test_weights_are_read_without_a_training(tmp_path):
    checkpoints = trained(tmp_path)
    checkpoints.save(1, {"epoch": 0.5})
    found = weights_of(Checkpoints(tmp_path).latest(), tmp_path)
    assert (found.step, found.extra) == (1, {"epoch": 0.5})
    expected = checkpoints._model.state_dict()
    assert found.model.keys() == expected.keys()
    assert all(torch.equal(found.model[name], value) for name, value in expected.items())


def test_weights_of_somebody_elses_checkpoint_are_refused(tmp_path):
    Checkpoints(tmp_path).save(5, b"no training")
    with pytest.raises(
        poptorch.Error, match=r"step 5 in .* does not contain the state of a training"
    ):
        weights_of(Checkpoints(tmp_path).latest(), tmp_path)


@pytest.mark.parametrize("data", [b"no training", b""])
def test_somebody_elses_checkpoint_is_refused(tmp_path, data):
    Checkpoints(tmp_path).save(5, data)
    with pytest.raises(
        poptorch.Error, match=r"step 5 in .* does not contain the state of a training"
    ):
        TrainingCheckpoints(tmp_path, training()).resume()


class Counting:
    """A loader with torch's stateful protocol, which notes what it loads."""

    def __init__(self):
        self.position = 0
        self.loaded = []

    def __iter__(self):
        while self.position < 4:
            self.position += 1
            self.loaded.append(self.position)
            yield torch.full((1, 2), float(self.position)), torch.zeros(1, dtype=torch.long)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]


def saved_after(folder, batches, loader):
    """Train on some batches of an epoch and save."""
    model = training()
    checkpoints = TrainingCheckpoints(folder, model, loader)
    epoch = checkpoints.batches()
    for _ in range(batches):
        model(*next(epoch))
    checkpoints.save(batches)
    return model


def test_a_stateful_loader_goes_on_where_it_was(tmp_path):
    saved_after(tmp_path, 2, Counting())
    loader, model = Counting(), training()
    resumed = TrainingCheckpoints(tmp_path, model, loader)
    assert resumed.resume() == (2, {})
    assert [inputs[0, 0].item() for inputs, _ in resumed.batches()] == [3, 4]
    assert resumed.epoch == 1
    assert loader.loaded == [3, 4]  # and nothing was loaded only to be skipped
    assert len(list(resumed.batches())) == 4


def test_another_loader_is_rewound(tmp_path):
    batches = list(Counting())
    saved_after(tmp_path, 3, batches)
    resumed = TrainingCheckpoints(tmp_path, training(), batches)
    resumed.resume()
    assert [inputs[0, 0].item() for inputs, _ in resumed.batches()] == [4]


@pytest.mark.parametrize(
    ("saved", "loader", "has"),
    [(Counting(), [], "has a state_dict"), (list(Counting()), Counting(), "has no state_dict")],
)
def test_a_loader_of_another_kind_cannot_go_on(tmp_path, saved, loader, has):
    saved_after(tmp_path, 1, saved)
    resumed = TrainingCheckpoints(tmp_path, training(), loader)
    assert resumed.resume()[0] == 1  # the weights may be all that is wanted
    with pytest.raises(
        poptorch.Error, match=f"{has}.*Resume with a loader of the type that was saved"
    ):
        next(iter(resumed.batches()))


def test_a_loaders_state_that_could_not_be_loaded_is_refused(tmp_path):
    loader = Counting()
    loader.state_dict = lambda: {"day": datetime.date(2020, 1, 1)}
    with pytest.raises(poptorch.Error, match=r"state_dict\(\) of Counting contains values"):
        saved_after(tmp_path, 1, loader)


def test_a_compiled_model_gets_the_saved_weights_too(tmp_path):
    model = saved_after(tmp_path, 2, Counting())
    compiled = training()
    compiled.compile(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))
    TrainingCheckpoints(tmp_path, compiled).resume()
    compiled.copyWeightsToHost()
    for name, value in model.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], value)


def test_an_inference_model_has_no_training_to_save_or_resume(tmp_path):
    saved_after(tmp_path, 1, Counting())
    checkpoints = TrainingCheckpoints(tmp_path, poptorch.inferenceModel(Net()))
    with pytest.raises(poptorch.Error, match="inference model"):
        checkpoints.resume()


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    saved_after(tmp_path, 1, Counting())
    newest = Checkpoints(tmp_path).latest()
    state = torch.load(io.BytesIO(newest.data), weights_only=True)
    file = io.BytesIO()
    torch.save({**state, "version": 1}, file)
    Checkpoints(tmp_path).save(2, file.getvalue())
    with pytest.raises(poptorch.Error, match="has format version 1: expected version 2"):
        TrainingCheckpoints(tmp_path, training()).resume()
