"""What a program can see of a compiled model: names, anchors, times, cycles."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


def test_names():
    model = Mlp()
    training = poptorch.trainingModel(model, quiet_options())
    with pytest.raises(AssertionError, match="must be compiled"):
        training.getTensorNames()
    training.compile(*classified(2))
    names = training.getTensorNames()
    for name in ("layers.0.weight", "Gradient___layers.0.weight", "UpdatedVar___layers.2.bias"):
        assert name in names
    for start in ("input", "loss", "scaledLearningRate", "weightDecayScaleFactor"):
        assert any(name.startswith(start) for name in names)


def test_names_are_those_of_the_optimizers_settings():
    model = Mlp()
    optimizer = poptorch.optim.Adam(model.parameters())
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    training.compile(*classified(2))
    names = training.getTensorNames()
    assert "learningRate___specific___layers.0.weight" in names
    assert set(optimizer.state_dict()["ipu_param"]) <= set(names)
    assert not any("scaledLearningRate" in name for name in names)


def test_settings_of_the_optimizer_can_be_anchored():
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=4.0)
    options = quiet_options()
    options.anchorTensor("rate", "scaledLearningRate0___specific___layers.0.bias")
    options.anchorTensor("scale", "lossScaling_FLOAT")
    training = poptorch.trainingModel(model, options, optimizer)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        training.setOptimizer(optimizer)
        training(*classified(2))
        assert training.getAnchoredTensor("rate").item() == rate / 4
        assert training.getAnchoredTensor("scale").item() == 4


def test_anchors_show_gradients_and_updates():
    model = WithLoss(nn.Linear(2, 1, bias=False))
    weight = model.model.weight.detach().clone()
    options = quiet_options().deviceIterations(2).replicationFactor(2)
    options.anchorTensor("gradient", "Gradient___model.weight", poptorch.OutputMode.All)
    options.anchorTensor("weight", "UpdatedVar___model.weight")
    options.anchorTensor("x", "input", poptorch.OutputMode.EveryN, 2)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.arange(8.0).reshape(4, 2)
    y = torch.zeros(4, 1)
    training(x, y)
    expected = torch.cat([2 * (row @ weight.T) * row for row in x.split(1)])
    torch.testing.assert_close(training.getAnchoredTensor("gradient"), expected)
    assert training.getAnchoredTensor("weight").shape == (2, 2)
    assert torch.equal(training.getAnchoredTensor("x"), x[2:])
    with pytest.raises(AssertionError, match="'other'"):
        training.getAnchoredTensor("other")


class Scoped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.head = nn.Linear(3, 1)

    def forward(self, x, y):
        x = self.body(x)
        with poptorch.NameScope("extra"):
            x = (x * 2 * 3).sort().values
        return torch.nn.functional.mse_loss(self.head(x), y)


OPERATIONS = [
    "body/0/linear", "body/1/relu", "extra/mul", "extra/mul/1", "extra/sort", "extra/sort:1",
    "head/linear", "mse_loss",
]  # fmt: skip


@pytest.mark.parametrize("scopes", [True, False])
def test_operations_are_named_by_their_scopes(scopes):
    options = quiet_options()
    if not scopes:
        options.disableModuleNamescope()
    training = poptorch.trainingModel(Scoped(), options)
    training.compile(torch.ones(1, 2), torch.ones(1, 1))
    without = ["linear", "relu", *OPERATIONS[2:6], "linear/1", "mse_loss"]
    names = training.getTensorNames()
    assert [name for name in names if name in OPERATIONS + without] == (
        OPERATIONS if scopes else without
    )


@pytest.mark.parametrize("mode", [poptorch.OutputMode.All, poptorch.OutputMode.Sum])
def test_anchors_show_results_of_operations(mode):
    options = quiet_options().deviceIterations(2).replicationFactor(2).outputMode(mode)
    for name in OPERATIONS:
        options.anchorTensor(name, name)
    model = Scoped()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    losses = training(x, y)
    hidden = model.body(x).detach()
    scaled, order = (hidden * 6).sort()
    values = [model.body[0](x), hidden, hidden * 2, hidden * 6, scaled, order, model.head(scaled)]
    for name, value in zip(OPERATIONS, values, strict=False):
        whole = value.detach()
        if mode == poptorch.OutputMode.Sum:
            whole = whole[:2] + whole[2:]
        torch.testing.assert_close(training.getAnchoredTensor(name), whole)
    assert torch.equal(training.getAnchoredTensor("mse_loss"), losses)


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ("body/0/linaer", "body/0/linear"),
        ("input/2", "input/1"),
        ("Gradient___head.wieght", "Gradient___head.weight"),
    ],
)
def test_unknown_tensors_cannot_be_anchored(wanted, nearest):
    options = quiet_options()
    options.anchorTensor("a", wanted)
    with pytest.raises(poptorch.Error, match=f"'{wanted}': .* nearest are .*{nearest}"):
        poptorch.trainingModel(Scoped(), options)(torch.ones(1, 2), torch.ones(1, 1))


def test_weights_that_do_not_train_have_no_gradient_to_anchor():
    options = quiet_options()
    options.anchorTensor("a", "Gradient___head.weight")
    model = Scoped()
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.body.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.Error, match="no such tensor"):
        training(torch.ones(1, 2), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("mode", "returned"),
    [
        (poptorch.OutputMode.All, 12),
        (poptorch.OutputMode.Final, 2),
        (poptorch.OutputMode.Sum, 2),
        (poptorch.OutputMode.EveryN, 4),
    ],
)
def test_counters(mode, returned):
    options = (
        quiet_options()
        .deviceIterations(3)
        .replicationFactor(2)
        .outputMode(mode, 3 if mode == poptorch.OutputMode.EveryN else None)
    )
    options.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(Mlp(), options)
    events = ["input", "input_complete", "output", "output_complete"]
    assert training.getPerfCounters() == {event: [[]] for event in events}
    assert training.getLatency() == (0, 0, 0)
    training(*classified(12))
    counters = training.getPerfCounters()
    assert [len(counters[event]) for event in events] == [2, 2, 2, 2]
    assert {len(steps) for steps in counters["input"]} == {12}
    assert {len(steps) for steps in counters["output"]} == {returned}
    for tensors in counters.values():
        assert all(steps == sorted(steps) for steps in tensors)
    if mode == poptorch.OutputMode.All:
        rows = zip(*(counters[event][0] for event in events), strict=True)
        assert all(list(row) == sorted(row) for row in rows)
    for latency in (
        training.getHostIpuLatency(),
        training.getComputeLatency(),
        training.getIpuHostLatency(),
        training.getLatency(),
    ):
        low, high, mean = latency
        assert 0 < low <= mean <= high


def test_synthetic_data_has_no_counters():
    inference = poptorch.inferenceModel(Mlp(), quiet_options().enableSyntheticData(True))
    inference(classified(2)[0])
    assert inference.getPerfCounters()["input"] == [[]]
    assert inference.getLatency() == (0, 0, 0)


def test_cycles(caplog):
    x, _ = classified(2)
    off = poptorch.inferenceModel(Mlp(), quiet_options())
    off(x)
    with pytest.raises(poptorch.Error, match=r"disabled.*logCycleCount"):
        off.cycleCount()
    on = poptorch.inferenceModel(Mlp(), quiet_options().logCycleCount(True))
    on.compile(x)
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        on.cycleCount()
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        on(x)
    assert on.cycleCount() > 0
    assert f"Total number of IPU cycles: {on.cycleCount()}" in caplog.text


def test_channels_return_what_they_are_given():
    channel = poptorch.profiling.Channel("mine")
    model = Mlp()
    assert channel.instrument(model, "forward") is model
    with channel.tracepoint("step"):
        pass


def test_exceptions_are_logged_and_torchvision_imports(tmp_path):
    """In a fresh interpreter, because both depend on what was imported before."""
    program = tmp_path / "program.py"
    program.write_text(
        "import popdist_py.poptorch, torchvision\n"
        "torchvision.models.resnet18\n"
        "raise RuntimeError('told')\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "[poptorch::python] [critical]" in done.stderr
    assert done.stderr.count("RuntimeError: told") == 1
