"""Tracebacks of a model's errors: the program's own lines, and none of this package's."""

from __future__ import annotations

import logging
import traceback

import pytest
import torch
import torch.nn.functional as F
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.execution.device_loop import Program
from popdist_py.poptorch.model import user_frames


class Wrong(nn.Module):
    """Fails in the line that ends with the name of ``how``."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.too_small = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, y):
        out = self.norm(torch.tanh(self.first(x)))
        if self.how == "shape":
            self.too_small(out)  # shape
        if self.how == "python":
            raise ValueError("of the program")  # python
        out = self.second(out)
        if self.how == "loss":
            return F.cross_entropy(out, y[:, None])  # loss
        return F.cross_entropy(out, y)  # target


def wrapped(how, execution="auto"):
    model = Wrong(how)
    options = quiet_options().replicationFactor(2).randomSeed(1)
    options.Emulator.set(replica_execution=execution)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer)


def frames_of(error):
    """Return the frames of an error from the test on: file names and lines."""
    found = traceback.extract_tb(error.__traceback__)
    return [(frame.filename.rpartition("/")[2], frame.line or "") for frame in found]


def assert_shows_forward(error, how):
    (_, first), second, third, *others = frames_of(error)
    assert "training" in first
    assert second[0] in ("model_on_device.py", "device_reports.py")
    assert third[0] == "test_user_frames.py"
    assert third[1].endswith(f"# {how}")
    assert all(place in ("linear.py", "functional.py") for place, _ in others)
    assert len(others) <= 1


@pytest.mark.parametrize("how", ["shape", "python", "loss"])
@pytest.mark.parametrize("call", ["__call__", "compile"])
def test_an_error_of_the_first_forward_shows_the_programs_line(call, how):
    training = wrapped(how)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        getattr(training, call)(*classified(8))
    assert_shows_forward(caught.value, how)


@pytest.mark.parametrize("call", ["schedule", "memoryReport", "executionReport"])
def test_an_error_of_a_report_shows_the_programs_line(call):
    training = wrapped("python")
    with pytest.raises(poptorch.Error, match="of the program") as caught:
        getattr(training, call)(*classified(8))
    assert len(frames_of(caught.value)) == 2
    ((_, line),) = frames_of(caught.value.__context__)
    assert line.endswith("# python")


@pytest.mark.parametrize("execution", ["loop", "graph", "fused", "fused graph"])
def test_an_error_of_a_later_call_shows_the_programs_line(execution):
    training = wrapped("target", execution)
    x, y = classified(8)
    training(x, y)
    assert training._compiled.program.back_end.startswith(execution)
    y[5] = 100
    with pytest.raises(IndexError, match="Target 100 is out of bounds") as caught:
        training(x, y)
    assert_shows_forward(caught.value, "target")
    y[5] = 0
    training(x, y)


def test_looking_for_the_programs_line_leaves_nothing_behind():
    training = wrapped("target", "graph")
    x, y = classified(8)
    training(x, y)
    model = training._compiled.program.replicas._model
    random = torch.get_rng_state()
    (rows,) = model.state.buffers_of_replicas(frozenset({"norm.running_mean"})).values()
    before = rows.clone()
    model.run_as_written(training._last_call, [x, y], 1)
    assert torch.equal(rows, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_other_arguments_show_the_call():
    training = wrapped("target")
    training(*classified(8))
    with pytest.raises(poptorch.Error, match="Shape mismatch for x") as caught:
        training(torch.ones(8, 5), torch.zeros(8, dtype=torch.long))
    assert len(frames_of(caught.value)) == 2


def test_an_error_of_a_hook_shows_its_line():
    def hook(gradient):
        raise ValueError("of a hook")

    model = Mlp()
    model.layers[0].weight.register_hook(hook)
    training = poptorch.trainingModel(model, quiet_options())
    with pytest.raises(ValueError, match="of a hook") as caught:
        training(*classified(4))
    assert frames_of(caught.value)[-1][1] == 'raise ValueError("of a hook")'
    assert [place for place, _ in frames_of(caught.value)].count("model_on_device.py") == 1


def test_an_error_of_modules_of_torch_shows_these():
    inference = poptorch.inferenceModel(nn.Sequential(nn.Linear(3, 4)), quiet_options())
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        inference(torch.ones(2, 6))
    places = [place for place, _ in frames_of(caught.value)]
    assert places == ["test_user_frames.py", "model_on_device.py", "container.py", "linear.py"]


def test_at_level_debug_nothing_is_left_out(caplog):
    caplog.set_level(logging.DEBUG, "poptorch::python")
    with pytest.raises(ValueError, match="of the program") as caught:
        wrapped("python")(*classified(8))
    assert "first_forward.py" in [place for place, _ in frames_of(caught.value)]


def test_a_failure_of_ours_is_shown_whole(monkeypatch):
    def run(*_):
        raise RuntimeError("of this package")

    code = run.__code__.replace(co_filename=f"{user_frames._OURS}somewhere.py")
    monkeypatch.setattr(Program, "run", type(run)(code, globals()))
    with pytest.raises(RuntimeError, match="of this package") as caught:
        wrapped("target")(*classified(8))
    assert [place for place, _ in frames_of(caught.value)][-2:] == [
        "model_on_device.py",
        "somewhere.py",
    ]


def test_what_an_error_follows_from_is_folded_too():
    class Chained(Mlp):
        def forward(self, x, y):
            try:
                return self.layers(torch.ones(2, 2))  # a first error
            except RuntimeError as error:
                raise ValueError("a second one") from error

    with pytest.raises(ValueError, match="a second one") as caught:
        poptorch.trainingModel(Chained(), quiet_options())(*classified(4))
    places = [place for place, _ in frames_of(caught.value.__cause__)]
    assert places == ["test_user_frames.py", "container.py", "linear.py"]
