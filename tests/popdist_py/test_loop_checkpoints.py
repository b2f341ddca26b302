"""Checkpoints of plain PyTorch loops: what is saved, when it is copied, and the bits at the end."""

from __future__ import annotations

import datetime
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from popdist_py import checkpoint
from popdist_py.checkpoint import Checkpoints, LoopCheckpoints
from popdist_py.environment import CHECKPOINT_MEMORY, MEMORY_CHECKPOINTS
from popdist_py.slot_files import copy_to_disk
from popdist_py.torch_states import loop_checkpoints, memory_copies
from popdist_py.torch_states.memory_copies import wait_for_copies

PROGRAM = Path(__file__).with_name("ddp_checkpoint_program.py")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv(CHECKPOINT_MEMORY, str(tmp_path / "memory"))
    monkeypatch.setenv(MEMORY_CHECKPOINTS, "1")
    return tmp_path / "memory"


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)
    )


class Loop:
    def __init__(self, folder, **options):
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.checkpoints = LoopCheckpoints(
            folder, model=self.model, optimizer=self.optimizer, schedule=self.schedule, **options
        )

    def train(self):
        """Train for one step on random numbers of torch, NumPy and Python."""
        inputs = torch.randn(8, 4) + float(np.random.random()) + random.random()
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("where", ["memory", "disk", "copied"])
def test_a_resumed_loop_ends_with_the_same_bits(tmp_path, memory, monkeypatch, where):
    if where == "disk":
        monkeypatch.delenv(CHECKPOINT_MEMORY)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    loop = Loop(tmp_path / "c", disk_every=1 if where == "disk" else 100)
    assert loop.checkpoints.resume() == 0
    for step in range(6):
        loop.train()
        if step < 3:
            loop.checkpoints.save(step + 1)
    wait_for_copies()
    if where == "copied":  # as the launcher does before the memory is lost
        assert copy_to_disk(memory) == {str(tmp_path / "c"): 3}
        shutil.rmtree(memory)
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    resumed = Loop(tmp_path / "c")
    torch.manual_seed(9)
    assert resumed.checkpoints.resume() == 3
    for _ in range(3):
        resumed.train()
    assert equal(loop.weights(), resumed.weights())
    assert resumed.schedule.get_last_lr() == loop.schedule.get_last_lr()
    assert (tmp_path / "c").exists() == (where != "memory")
    assert memory.exists() == (where == "memory")


def slowed(checkpoints, seconds=0.05):
    """Delay the copies, so that the training goes on before they begin."""
    write = checkpoints._memory._slots.write

    def slowly(*args):
        time.sleep(seconds)
        return write(*args)

    checkpoints._memory._slots.write = slowly


def test_updates_wait_for_the_copies(tmp_path, memory):
    loop = Loop(tmp_path / "c", disk_every=100)
    slowed(loop.checkpoints)
    loop.train()
    for step in range(1, 4):
        loop.checkpoints.save(step)
        weights = loop.weights()
        loop.train()
        resumed = Loop(tmp_path / "c")
        assert resumed.checkpoints.resume() == step
        assert equal(weights, resumed.weights())


def test_gradients_wait_for_the_copies(tmp_path, memory):
    loop = Loop(tmp_path / "c", disk_every=100)
    slowed(loop.checkpoints, 0.5)
    loop.train()
    loop.checkpoints.save(1)
    (copy,) = memory_copies._unfinished
    done_at_gradients = []
    loop.model[3].weight.register_hook(lambda _: done_at_gradients.append(copy.done()))
    out = loop.model(torch.randn(8, 4)).square().mean()
    assert not copy.done()
    out.backward()
    assert done_at_gradients == [True]


def test_weights_changed_after_a_save_are_never_half_copied(tmp_path, memory):
    loop = Loop(tmp_path / "c", disk_every=100)
    slowed(loop.checkpoints)
    loop.train()
    loop.checkpoints.save(1)
    wait_for_copies()
    first = loop.weights()
    for step in (2, 3):
        loop.checkpoints.save(step)
        with torch.no_grad():
            loop.model[0].weight.mul_(0.5)
        wait_for_copies()
        resumed = Loop(tmp_path / "c")
        # The changed state is dropped once; later states are complete before save() returns.
        assert resumed.checkpoints.resume() == {2: 1, 3: 3}[step]
        if step == 2:
            assert equal(first, resumed.weights())
            continue
        halved = {**first, "0.weight": first["0.weight"] * 0.5}
        assert equal(halved, resumed.weights())


def test_objects_without_a_state_are_refused(tmp_path):
    with pytest.raises(
        TypeError, match=r"model=3: expected an object with the methods state_dict\(\)"
    ):
        LoopCheckpoints(tmp_path, model=3)


class Dated:
    def state_dict(self):
        return {"day": datetime.date(2020, 1, 1)}

    def load_state_dict(self, state):
        pass


def test_states_that_could_not_be_loaded_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"state_dict\(\) of dated contains values"):
        LoopCheckpoints(tmp_path, dated=Dated()).save(1)
    assert not list(tmp_path.iterdir())


def test_a_later_state_that_could_not_be_loaded_is_refused(tmp_path, memory):
    dated = Dated()
    checkpoints = LoopCheckpoints(tmp_path / "c", dated=dated)
    dated.state_dict = lambda: {"best": 0.5}
    checkpoints.save(1)
    dated.state_dict = lambda: {"best": np.float64(0.5)}
    with pytest.raises(TypeError, match=r"state_dict\(\) of dated contains values"):
        checkpoints.save(2)
    assert checkpoints.resume() == 1


class Second:
    """The calls of instance 1 to a job of two instances."""

    instance_index = 1

    def all_gather_object(self, value):
        return [value, value]


def test_an_instance_that_saves_nothing_needs_no_state_of_its_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_checkpoints, "_peers", Second)
    loop = Loop(tmp_path / "c")

    def refuse():
        raise RuntimeError("the state is on instance 0")

    monkeypatch.setattr(loop.optimizer, "state_dict", refuse)
    loop.checkpoints.save(1)
    assert not (tmp_path / "c").exists()


def test_other_checkpoints_are_refused(tmp_path):
    Checkpoints(tmp_path).save(5, b"something")
    with pytest.raises(ValueError, match=r"step 5 in .* was not saved by this version"):
        Loop(tmp_path).checkpoints.resume()


def test_the_module_has_no_other_late_names():
    with pytest.raises(AttributeError, match="no attribute 'Others'"):
        checkpoint.Others  # noqa: B018


@pytest.mark.mpi
@pytest.mark.timeout(200)
@pytest.mark.parametrize("width", ["8", "70000"])  # the instances divide the larger state
def test_a_killed_rank_of_ddp_goes_on_to_the_bit(poprun, warm, tmp_path, width):
    env = {"WIDTH": width}
    words = ("--num-instances", "2", "--num-replicas", "2", "--memory-checkpoints")
    whole = poprun(*words, *warm, PROGRAM, tmp_path / "a", env=env, timeout=80)
    assert whole.returncode == 0, whole.stderr
    env["DIE_ONCE_AT"] = "1:7"
    killed = poprun(*words, "--max-restarts", "1", PROGRAM, tmp_path / "b", env=env, timeout=80)
    assert killed.returncode == 0, killed.stderr
    assert set(re.findall(r"resumed at (\d+)", killed.stdout)) == {"0", "7"}
    digests = [sorted(re.findall(r"digest (\w+)", done.stdout)) for done in (whole, killed)]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
