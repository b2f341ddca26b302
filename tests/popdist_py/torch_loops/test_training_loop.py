"""Steps, activities and spans of plain PyTorch loops, with torch's own optimizers and loaders."""

from __future__ import annotations

import contextlib
import itertools
import os
import time

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch.optim import optimizer as torch_optimizer
from torch.utils import data

from popdist_py import activities, heartbeat, poptorch
from popdist_py.activities import COMPUTING, LOADING, OTHER, UPDATING, ledger
from popdist_py.environment import AUTOMATIC, BETWEEN_CALLS
from popdist_py.timeline import spans
from popdist_py.torch_loops import training_loop
from poprun_py.instance.progress_memory import ProgressMemory

PAUSE = 0.02
PAUSE_NANOSECONDS = int(PAUSE * 1e9)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Give each test counters of its own, which the wrapper's side reads."""
    memory = ProgressMemory()
    for name, value in memory.variables().items():
        monkeypatch.setenv(name, value)
    for module, names in (
        (ledger, ("_owner", "_last_step", "_computed_by_own_code")),
        (torch.autograd, ("backward",)),
        (data.dataloader._BaseDataLoaderIter, ("__next__",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    # Other tests of this process may have counted steps, or made PopTorch models.
    for name in ("_is_explicit", "_has_model", "_has_stepped"):
        monkeypatch.setattr(heartbeat, name, False)
    monkeypatch.setattr(heartbeat, "_num_automatic", 0)
    monkeypatch.setattr(heartbeat, "_first_ended", None)
    monkeypatch.setattr(heartbeat, "_words", None)
    monkeypatch.setattr(ledger, "_words", None)
    activities.begin()
    return memory


@pytest.fixture
def loop():
    """Observe this process as the start hook does."""
    loop = training_loop.make_loop()
    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda each, *_: loop.begin_update(each)),
        torch_optimizer.register_optimizer_step_post_hook(lambda each, *_: loop.end_update(each)),
    ]
    yield loop
    for hook in hooks:
        hook.remove()


def weights(number=1):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(number)]


def sgd():
    return torch.optim.SGD(weights(), lr=0.1)


def progress(memory):
    return memory.progress() or [0, 0, 0, 0]


def test_the_steps_of_an_optimizer_are_counted_without_a_call(memory, loop):
    optimizer = sgd()
    optimizer.step()
    assert not memory.counts_steps()  # a program that counts itself does so before its second step
    optimizer.step()
    time.sleep(PAUSE)
    optimizer.step()
    assert progress(memory) == [3, 0, 0, AUTOMATIC]
    assert memory.counts_steps()
    (first, second, third) = memory.steps(0)["rows"]
    assert [row[0] for row in (first, second, third)] == [1, 2, 3]
    assert (first[2], third[4], third[5]) == (-1, 0, None)
    assert first[1] + second[2] == second[1]
    assert third[2] >= PAUSE_NANOSECONDS
    assert memory.ledger()["timed"] == 2


def test_the_only_step_of_a_program_is_counted_at_its_end(memory, loop):
    sgd().step()
    heartbeat._count_first_step()
    assert progress(memory) == [1, 0, 0, AUTOMATIC]
    assert memory.steps(0)["made"] == 1


@pytest.mark.parametrize("num_before", [0, 1, 2, 5])
def test_a_program_that_counts_its_steps_itself_is_not_counted_twice(memory, loop, num_before):
    optimizer = sgd()
    for _ in range(num_before):
        optimizer.step()
    for number in range(1, 4):
        optimizer.step()
        heartbeat.step(samples=8, loss=0.5)
        assert progress(memory) == [number, 0, 0, BETWEEN_CALLS]
    found = memory.ledger()
    assert (found["samples"], found["timed"], len(found["steps"])) == (24, 2, 2)
    rows = memory.steps(0)["rows"]
    assert [row[0] for row in rows[-3:]] == [1, 2, 3]
    assert len(rows) == 3 + (0 if num_before == 0 else num_before + 1)


def test_a_poptorch_model_ends_counting_and_counts_its_calls(memory, loop):
    optimizer = sgd()
    for _ in range(3):
        optimizer.step()
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert progress(memory)[0] == 0
    for _ in range(2):
        training(*classified(4))
        optimizer.step()
    assert progress(memory) == [2, 0, 0, BETWEEN_CALLS]


def test_optimizers_beside_a_poptorch_model_are_not_observed(memory, loop):
    optimizer = SlowSgd(weights(), lr=0.1)
    heartbeat.expect()
    for _ in range(3):
        optimizer.step()
    assert spent(memory).get("updating", 0) == 0


def test_a_program_with_a_poptorch_model_is_not_touched():
    backward = torch.autograd.backward
    heartbeat.expect()
    assert training_loop.make_loop() is None
    assert torch.autograd.backward is backward


def test_counting_goes_on_from_the_step_of_a_checkpoint(memory, loop):
    optimizer = sgd()
    heartbeat.resume(20)
    for _ in range(3):
        optimizer.step()
    assert progress(memory) == [23, 0, 20, AUTOMATIC]
    heartbeat.resume(10)
    optimizer.step()
    assert progress(memory)[0] == 11
    heartbeat.step()
    assert progress(memory)[0] == 11
    assert heartbeat.steps() == 11


def test_a_step_of_the_base_class_within_a_step_counts_once(memory, loop):
    """The optimizer of Horovod is such a class."""
    optimizer = SlowSgd(weights(), lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert progress(memory)[0] == 3


def test_lbfgs_counts_one_step_for_all_its_evaluations(memory, loop):
    parameters = weights()
    optimizer = torch.optim.LBFGS(parameters, max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = (parameters[0] - 3).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert progress(memory)[0] == 2


def test_steps_that_a_scaler_skips_and_accumulated_batches_do_not_count(memory, loop):
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0, 1.0):
        for _ in range(3):
            scaler.scale(parameters[0].sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert progress(memory)[0] == 3


def test_forked_processes_count_nothing(memory, loop):
    optimizer = sgd()
    optimizer.step()
    optimizer.step()
    if os.fork() == 0:
        optimizer.step()
        heartbeat._count_first_step()
        os._exit(0)
    assert os.wait()[1] == 0
    assert progress(memory)[0] == 2


class Slow(data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(PAUSE)
        return torch.ones(2)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(context, gradient):
        time.sleep(PAUSE)
        return gradient.expand(context.shape)


class SlowSgd(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(PAUSE)
        super().step(closure)


def train(batches):
    parameters = weights()
    optimizer = SlowSgd(parameters, lr=0.1)
    for batch in batches:
        time.sleep(PAUSE)  # the forward pass
        SlowBackward.apply(parameters[0] * batch).backward()
        optimizer.step()
        time.sleep(PAUSE)


def spent(memory):
    """Return the times of activities in pauses, which are a little longer than they should be."""
    nanoseconds = memory.ledger()["nanoseconds"]
    return {
        activities.NAMES[each]: int(nanoseconds[each] / PAUSE_NANOSECONDS)
        for each in (OTHER, LOADING, COMPUTING, UPDATING)
    }


def test_the_times_of_a_loop_belong_to_its_activities(memory, loop):
    train(data.DataLoader(Slow()))
    found = spent(memory)
    assert min(found["loading"], found["computing"] / 2, found["updating"], found["other"]) >= 2
    assert memory.ledger()["timed"] == 1


def test_without_a_loader_only_backward_is_known_to_compute(memory, loop):
    train([torch.ones(2)] * 2)
    found = spent(memory)
    assert min(found["computing"], found["updating"], found["other"] / 2) >= 2
    assert found["computing"] < 4
    assert found["loading"] == 0


def test_activities_that_the_program_reports_are_not_counted_again(memory, loop):
    with activities.doing(activities.VALIDATING):
        train(data.DataLoader(Slow()))
    found = memory.ledger()["nanoseconds"]
    assert found[activities.VALIDATING] >= 10 * PAUSE_NANOSECONDS
    assert found[LOADING] == found[COMPUTING] == found[UPDATING] == 0


def test_moved_time_is_counted_once(memory, loop):
    train(data.DataLoader(Slow()))
    with activities.doing(activities.SAVING):
        found = memory.ledger()
    assert sum(found["nanoseconds"]) == found["now"] - found["began"]
    assert 0 <= found["nanoseconds"][activities.SAVING] < PAUSE_NANOSECONDS


class Careful(torch.optim.SGD):
    """An optimizer that goes on after a failed step of another one."""

    def step(self, closure=None):
        time.sleep(PAUSE)
        with contextlib.suppress(ZeroDivisionError):
            torch.optim.Adam(weights()).step(lambda: 1 / 0)


def test_a_step_that_fails_leaves_nothing_behind(memory, loop):
    optimizer = Careful(weights(), lr=0.1)
    with pytest.raises(ZeroDivisionError):
        SlowSgd(weights(), lr=0.1).step(lambda: 1 / 0)
    time.sleep(10 * PAUSE)
    for _ in range(2):
        optimizer.step()
    assert 2 <= spent(memory)["updating"] < 10


def test_waits_in_torch_are_no_certain_waits_of_a_plain_loop(memory, loop):
    optimizer = sgd()
    with activities.doing(activities.WAITING):
        assert memory.waits()
        optimizer.step()
        optimizer.step()
        assert not memory.waits()
        reducing = activities.doing(activities.REDUCING, "all_reduce")
        with reducing, activities.doing(activities.WAITING):
            assert memory.waits()
        heartbeat.step()
        assert memory.waits()


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Record a timeline; return its spans so far, as names, begins, ends and arguments."""
    monkeypatch.setattr(spans, "_recorder", spans._recorder)
    monkeypatch.setattr(ledger, "_listener", None)
    spans._begin(str(tmp_path / "instance-0"), 1 << 20)
    found, record = [], spans._recorder.record

    def kept(name, track, begin, end, arguments="", **more):
        found.append((name, begin, end, arguments))
        record(name, track, begin, end, arguments, **more)

    monkeypatch.setattr(spans._recorder, "record", kept)
    return found


def test_the_loop_is_recorded_in_the_timeline(memory, recorded, loop):
    optimizer = sgd()
    for batch in data.DataLoader(data.TensorDataset(torch.ones(2))):
        (optimizer.param_groups[0]["params"][0] * batch[0]).sum().backward()
        optimizer.step()
    once = ["load", "forward", "backward", "update"]
    assert [name for name, *_ in recorded] == [*once, *once, "step", "load"]
    ends = [(begin, end) for name, begin, end, _ in recorded if name != "step"]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_spans_of_a_step_that_evaluates_lie_in_it(memory, recorded, loop):
    parameters = weights()
    optimizer = torch.optim.LBFGS(parameters, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (parameters[0] - 3).square().sum()
        loss.backward()
        return loss

    for _ in data.DataLoader(data.TensorDataset(torch.ones(1))):
        time.sleep(PAUSE)
        optimizer.step(closure)
    ((_, begin, end, _),) = [each for each in recorded if each[0] == "update"]
    inside = [each for each in recorded if each[0] in ("forward", "backward")]
    assert len(inside) >= 4
    loaded = min(each[2] for each in recorded if each[0] == "load")
    assert begin - loaded >= PAUSE_NANOSECONDS
    assert all(begin <= each[1] <= each[2] <= end for each in inside)


def test_a_backward_pass_tells_how_long_it_waited(memory, recorded, loop):
    def waits():
        time.sleep(0.003)
        ledger.count_as_waiting(2_500_000)

    loop.backward(waits)
    loop.backward(lambda: None)
    assert [each[3] for each in recorded] == ['{"waited_ms": 2.5}', ""]
