"""States of PopTorch's trainings in memory: the values and the results as from the disk."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

import popdist_py
from popdist_py import heartbeat, memory_slots, poptorch
from popdist_py.checkpoint import Checkpoints
from popdist_py.environment import CHECKPOINT_MEMORY, MEMORY_CHECKPOINTS
from popdist_py.memory_slots import MemorySlots, slots_folder
from popdist_py.poptorch.checkpoint import TrainingCheckpoints, weights_of
from popdist_py.slot_files import copy_to_disk
from popdist_py.torch_states.memory_copies import wait_for_copies


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3),
            torch.nn.ReLU(), torch.nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self.layers(inputs), labels)


def sgd(parameters):
    return poptorch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return poptorch.optim.AdamW(parameters, lr=0.01, loss_scaling=4.0)


def training(make_optimizer=sgd, loss_scaling=False, half=False, options=None):
    if options is None:
        options = poptorch.Options().replicationFactor(2)
    options.showCompilationProgressBar(False)
    options.randomSeed(3)
    options.Training.setAutomaticLossScaling(loss_scaling)
    net = Net().half() if half else Net()
    return poptorch.trainingModel(net, options, make_optimizer(net.parameters()))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, torch.randint(3, (8,), generator=generator)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    monkeypatch.setenv(CHECKPOINT_MEMORY, str(folder))
    monkeypatch.setenv(MEMORY_CHECKPOINTS, "1")
    return folder


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def lamb(parameters):
    return poptorch.optim.LAMB(parameters, lr=0.01)


def rmsprop(parameters):
    return poptorch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True)


@pytest.mark.parametrize(
    ("optimizer", "scaled", "half"),
    [
        (sgd, False, False),
        (adamw, False, False),
        (sgd, True, False),
        (adamw, False, True),
        (lamb, False, False),
        (rmsprop, False, False),
    ],
)
def test_live_states_are_the_states(optimizer, scaled, half):
    model = training(optimizer, scaled, half)
    for step in range(3):
        inputs, labels = batch(step)
        model(inputs.half() if half else inputs, labels)
    live = model.live_module()
    own, shared = model.instance_state(live), model.training_state(live)
    assert model._weights.device_is_newer  # nothing was copied to the host
    assert len(live.weights) == 6
    shared = {**shared, "model": {k: v.clone() for k, v in shared["model"].items()}}
    assert same(shared, model.training_state())
    assert same(own, model.instance_state())


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 4))

    def forward(self, inputs):
        return poptorch.identity_loss(inputs * self.w, "mean")


def test_parameters_of_groups_of_replicas_are_resumed(tmp_path, memory):
    def run(first, last, folder):
        net = Scale()
        options = poptorch.Options().showCompilationProgressBar(False).replicationFactor(2)
        model = poptorch.trainingModel(net, options, sgd(net.parameters()))
        model.w.replicaGrouping(
            poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
        )
        checkpoints = TrainingCheckpoints(folder, model, disk_every=100)
        assert checkpoints.resume()[0] == first
        for step in range(first, last):
            model(batch(step)[0])
            checkpoints.save(step + 1)
        wait_for_copies()
        return model.state_dict()["w"].clone()

    whole = run(0, 4, tmp_path / "whole")
    run(0, 2, tmp_path / "parts")
    assert torch.equal(run(2, 4, tmp_path / "parts"), whole)


class Turned(Net):
    """A model with a view of a weight as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turned", self.layers[4].weight.detach().t())


def test_buffers_that_share_memory_with_weights_are_resumed(tmp_path, memory):
    def run(first, last, folder):
        net = Turned()
        options = poptorch.Options().showCompilationProgressBar(False).randomSeed(3)
        model = poptorch.trainingModel(net, options, sgd(net.parameters()))
        checkpoints = TrainingCheckpoints(folder, model, disk_every=100)
        assert checkpoints.resume()[0] == first
        for step in range(first, last):
            model(*batch(step))
            checkpoints.save(step + 1)
        wait_for_copies()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = run(0, 4, tmp_path / "whole")
    run(0, 2, tmp_path / "parts")
    assert same(run(2, 4, tmp_path / "parts"), whole)


def test_a_resumed_training_ends_with_the_same_bits(tmp_path, memory):
    def run(first, last, folder):
        model = training(adamw)
        checkpoints = TrainingCheckpoints(folder, model, disk_every=100)
        step, extra = checkpoints.resume()
        assert step == first
        assert extra == ({"note": [first]} if first else {})
        losses = []
        for number in range(step, last):
            losses.append(model(*batch(number)))
            checkpoints.save(number + 1, {"note": [number + 1]})
        wait_for_copies()
        return losses, model.state_dict()

    whole, weights = run(0, 6, tmp_path / "whole")
    before, _ = run(0, 3, tmp_path / "parts")
    after, resumed = run(3, 6, tmp_path / "parts")
    assert same(whole, before + after)
    assert same(dict(weights), dict(resumed))
    assert not (tmp_path / "parts").exists()
    assert len(list(memory.iterdir())) == 2


def test_a_state_that_was_copied_to_the_disk_without_the_program_is_resumed(tmp_path, memory):
    def trained(first, last):
        model = training(adamw)
        checkpoints = TrainingCheckpoints(tmp_path / "c", model, disk_every=100)
        assert checkpoints.resume()[0] == first
        for number in range(first, last):
            model(*batch(number))
            checkpoints.save(number + 1)
        wait_for_copies()
        return dict(model.state_dict())

    weights = trained(0, 2)
    assert copy_to_disk(memory) == {str(tmp_path / "c"): 2}
    assert same(weights, dict(weights_of(Checkpoints(tmp_path / "c").latest(), "c").model))
    whole = trained(2, 4)
    shutil.rmtree(memory)
    assert same(trained(2, 4), whole)


def slowed(checkpoints, seconds):
    write = checkpoints._memory._slots.write

    def slowly(*args):
        time.sleep(seconds)
        return write(*args)

    checkpoints._memory._slots.write = slowly


def test_states_during_the_next_step_are_those_of_their_step(tmp_path, memory):
    """The optimiser must not change tensors while they are copied."""
    model = training(adamw)
    checkpoints = TrainingCheckpoints(tmp_path / "disk", model, disk_every=100)
    slots = MemorySlots(slots_folder(str(memory), tmp_path / "disk"))
    slowed(checkpoints, 0.05)
    model(*batch(0))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(1, 4):
        checkpoints.save(step)
        model(*batch(step))
        found = slots.newest()
        assert found.step == step
        again = training(adamw)
        resumed = TrainingCheckpoints(tmp_path / "disk", again)
        assert resumed.resume()[0] == step
        assert same(weights, dict(again.state_dict()))
        weights = {k: v.clone() for k, v in model.state_dict().items()}


def late_sums(array, target=None, sums=memory_slots._sums):
    time.sleep(0 if target is None else 0.3)
    return sums(array, target)


def _resumed_steps(folder):
    """Train in a job in which only instance 0 reads its weights; resume after each step."""
    popdist_py.init()
    resumed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHECKPOINT_MEMORY, f"{folder}/memory")
        patch.setenv(MEMORY_CHECKPOINTS, "1")
        patch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
        model = training(options=poptorch.DistributedOptions())
        checkpoints = TrainingCheckpoints(f"{folder}/disk", model, disk_every=100)
        # A part of instance 1 would begin first and end last.
        if popdist_py.getInstanceIndex() == 0:
            slowed(checkpoints, 0.1)
        else:
            patch.setattr(memory_slots, "_sums", late_sums)
        for step in range(1, 4):
            model(*batch(step))
            if popdist_py.getInstanceIndex() == 0:
                model.state_dict()
            checkpoints.save(step)
            again = training(options=poptorch.DistributedOptions())
            resumed.append(TrainingCheckpoints(f"{folder}/disk", again).resume()[0])
    return resumed


@pytest.mark.mpi
def test_instances_store_a_state_after_one_of_them_has_read_its_weights(instances, tmp_path):
    assert instances.run(_resumed_steps, str(tmp_path)) == [[1, 2, 3]] * 2


def test_the_newer_of_memory_and_disk_is_resumed(tmp_path, memory):
    model = training()
    checkpoints = TrainingCheckpoints(tmp_path / "disk", model, disk_every=2)
    for step in range(1, 6):
        model(*batch(step))
        checkpoints.save(step)
    assert Checkpoints(tmp_path / "disk").steps() == [4, 2]
    assert TrainingCheckpoints(tmp_path / "disk", training()).resume()[0] == 5
    for path in memory.rglob("slot-*"):
        path.write_bytes(b"damaged" * 100)
    assert TrainingCheckpoints(tmp_path / "disk", training()).resume()[0] == 4


def test_a_stop_is_saved_on_the_disk(tmp_path, monkeypatch):
    model = training()
    checkpoints = TrainingCheckpoints(tmp_path / "disk", model, disk_every=100)
    model(*batch(0))
    checkpoints.save(1)
    assert not (tmp_path / "disk").exists()
    monkeypatch.setattr(heartbeat, "_is_stopping", True)
    checkpoints.save(2)
    assert Checkpoints(tmp_path / "disk").steps() == [2]


def test_without_a_launcher_nothing_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.delenv(CHECKPOINT_MEMORY, raising=False)
    checkpoints = TrainingCheckpoints(tmp_path, training(), memory_every=1)
    assert checkpoints._memory is None


def test_a_job_without_the_option_has_nothing_in_memory(tmp_path, memory, monkeypatch):
    monkeypatch.delenv(MEMORY_CHECKPOINTS)
    model = training()
    model(*batch(0))
    TrainingCheckpoints(tmp_path / "disk", model).save(1)
    assert not memory.exists()
    TrainingCheckpoints(tmp_path / "disk", model, memory_every=1).save(1)
    assert memory.exists()


def test_too_little_memory_is_a_warning(tmp_path, memory, monkeypatch):
    model = training()
    checkpoints = TrainingCheckpoints(tmp_path / "disk", model)
    model(*batch(0))
    checkpoints.save(1)
    wait_for_copies()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    checkpoints._memory._slots._maps = [None, None]
    with pytest.warns(UserWarning, match=r"no longer copied to memory .*No space left"):  # noqa: PT031
        checkpoints.save(2)
        wait_for_copies()
    assert not list(memory.iterdir())
    checkpoints.save(3)
    assert TrainingCheckpoints(tmp_path / "disk", training()).resume()[0] == 3


@pytest.mark.parametrize("numbers", [{"memory_every": 0}, {"disk_every": 0}])
def test_wrong_numbers_of_steps_are_refused(tmp_path, numbers):
    with pytest.raises(ValueError, match=r"=0: .*at least 1"):
        TrainingCheckpoints(tmp_path, training(), **numbers)
