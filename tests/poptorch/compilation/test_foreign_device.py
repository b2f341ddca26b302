"""A back end on a device with its own memory is one row, and computes what the loop computes."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from poptorch.compilation.foreign_device import (
    CROSSINGS,
    ERRORS,
    ROW,
    ForeignTensor,
    from_device,
    to_device,
)
from support.models import Mlp, classified, quiet_options
from support.repository import ROOT
from torch import nn

import popdist_py
import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import backends
from popdist_py.poptorch.compilation.backends import BACKENDS, register
from popdist_py.poptorch.options import emulator_options


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", list(BACKENDS))
    executions = list(emulator_options.EXECUTIONS)
    monkeypatch.setattr(emulator_options, "EXECUTIONS", executions)
    monkeypatch.setattr(backends, "EXECUTIONS", executions)
    register(ROW)
    CROSSINGS.clear()
    yield
    ERRORS.clear()


class Cnn(nn.Module):
    """A CNN with statistics of each replica, random numbers, a constant and a new tensor."""

    def __init__(self):
        super().__init__()
        # The gradient of a bias before a batch norm is only rounding, which Adam would enlarge.
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
        )
        self.last = nn.Linear(48, 4)
        self.shift = torch.linspace(-1, 1, 36)

    def forward(self, x, y=None):
        weights = torch.arange(36.0) / 36
        out = self.last(self.layers((x * weights + self.shift).view(-1, 1, 6, 6)))
        return out if y is None else (out, F.cross_entropy(out, y))


class Frozen(Mlp):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)


def sgd(parameters):
    return poptorch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, loss_scaling=8.0, max_grad_norm=1.0
    )


OPTIMIZERS = {
    "SGD": sgd,
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: poptorch.optim.AdamW(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "LAMB": lambda parameters: poptorch.optim.LAMB(parameters, lr=0.01),
}


def options_for(execution, replicas, accumulation=1, iterations=1):
    options = quiet_options().replicationFactor(replicas).deviceIterations(iterations)
    options.broadcastBuffers(False).randomSeed(7).outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.replicaExecution(execution)
    return options


def run(execution, make, optimizer, replicas, accumulation, iterations):
    """Train twice, change a weight on the host, train and infer; return all that results."""
    torch.manual_seed(0)
    model, inputs = make(), 36 if make is Cnn else 6
    options = options_for(execution, replicas, accumulation, iterations)
    training = poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model.parameters()))
    samples = 4 * replicas * accumulation * iterations
    results = [*training(*classified(samples, inputs, seed=1))]
    results += training(*classified(samples, inputs, seed=2))
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    training.copyWeightsToDevice()
    results += training(*classified(samples, inputs, seed=3))
    found = [training._compiled.program.back_end]
    inference = poptorch.inferenceModel(
        model.eval(), options_for(execution, replicas, 1, iterations)
    )
    results.append(inference(classified(4 * replicas * iterations, inputs)[0]))
    found.append(inference._compiled.program.back_end)
    return found, [*results, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    ("make", "optimizer", "replicas", "accumulation", "iterations"),
    [
        (Mlp, "SGD", 1, 1, 1),
        (Mlp, "Adam", 2, 3, 2),
        (Mlp, "LAMB", 1, 2, 1),
        (Frozen, "AdamW", 2, 1, 2),
        (Cnn, "SGD", 1, 2, 2),
        (Cnn, "AdamW", 2, 2, 1),
        (Cnn, "RMSprop", 2, 1, 2),
    ],
)
def test_a_foreign_device_computes_what_the_loop_computes(
    make, optimizer, replicas, accumulation, iterations
):
    settings = (make, optimizer, replicas, accumulation, iterations)
    names, expected = run("loop", *settings)
    assert names == ["loop", "loop"]
    assert not CROSSINGS
    found, results = run("foreign", *settings)
    assert found == ["foreign", "foreign"]
    for ours, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def trained(make, execution="foreign", replicas=2, inputs=6):
    torch.manual_seed(0)
    model = make()
    training = poptorch.trainingModel(
        model, options_for(execution, replicas, 3, 2), sgd(model.parameters())
    )
    batch = classified(24 * replicas, inputs)
    training.compile(*batch)
    CROSSINGS.clear()
    return training, batch


@pytest.mark.parametrize(("make", "frozen"), [(Mlp, 0), (Frozen, 2)])
def test_weights_cross_once_for_each_update(make, frozen):
    training, batch = trained(make)
    training(*batch)
    updates, micro_batches, updated = 2, 6, 4 - frozen
    # The comparison of back ends has changed and restored all weights.
    weights = frozen + updates * updated
    assert CROSSINGS["to the device"] == 2 * micro_batches + weights
    # Each replica has two outputs, and the replicas add their gradients on the device.
    assert CROSSINGS["from the device"] == micro_batches * (2 * 2 + updated)
    CROSSINGS.clear()
    training(*batch)
    assert CROSSINGS["to the device"] == 2 * micro_batches + updates * updated


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_device_with_wrong_gradients_is_refused(replicas):
    ERRORS[torch.ops.aten.tanh_backward.default] = 1 + 1e-4
    reason = "foreign: its gradients are not those of the loop"
    with pytest.raises(
        poptorch.Error, match=f"'foreign'.* is not possible .*{reason}.*: choose 'auto' or 'loop'"
    ):
        trained(Mlp, replicas=replicas)
    assert trained(Mlp, "auto")[0]._compiled.program.back_end == "fused graph"


def test_auto_takes_the_device_first():
    assert trained(Mlp, "auto")[0]._compiled.program.back_end == "foreign"


def test_copies_that_are_made_before_the_comparison_are_renewed(monkeypatch):
    def make(*args):
        replicas = ROW.make(*args)
        replicas._copy_newer()
        return replicas

    monkeypatch.setattr(backends, "BACKENDS", [BACKENDS[0], replace(ROW, make=make)])
    assert trained(Mlp)[0]._compiled.program.back_end == "foreign"


def test_modules_keep_the_tensors_of_the_cpu():
    training, batch = trained(Cnn, inputs=36)
    training(*batch)
    model = training._user_model
    with training._compiled.state.swapped_in():
        kept = [*model.parameters(), *model.buffers(), model.shift]
    assert not any(isinstance(tensor, ForeignTensor) for tensor in kept)


def test_modes_that_read_values_on_the_cpu_are_refused():
    options = options_for("foreign", 2)
    options.Precision.enableFloatingPointExceptions(True)
    with pytest.raises(poptorch.Error, match="modes that read values in the memory of the CPU"):
        poptorch.inferenceModel(Mlp(), options).compile(torch.ones(8, 6))


class Remembering(Mlp):
    """Stores a tensor in an attribute, whose first value is in the memory of the CPU."""

    def __init__(self):
        super().__init__()
        self.before = torch.zeros(8, 6)

    def forward(self, x, y):
        x = x + self.before[: len(x)]
        self.before = x.detach()
        return super().forward(x, y)


class ReadByNumpy(Mlp):
    def forward(self, x, y):
        return super().forward(x * float(x.detach().numpy()[0, 0] > 0), y)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Remembering, "expected all tensors to be on the foreign"), (ReadByNumpy, "numpy")],
)
def test_a_model_that_mixes_devices_is_refused(make, reason):
    with pytest.raises(poptorch.Error, match=f"foreign.*not possible.*{reason}"):
        trained(make)
    assert trained(make, "auto")[0]._compiled.program.back_end != "foreign"


class Changing(Mlp):
    """Its forward changes an input and a buffer before a line that may fail."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, y):
        out = self.layers(x.clone())
        with torch.no_grad():
            self.count.add_(1)
            x.add_(self.count)
        return out, F.cross_entropy(out, y)


def test_changed_buffers_and_inputs_are_stored_on_the_cpu():
    results = []
    for execution in ("loop", "foreign"):
        training, (x, y) = trained(Changing, execution)
        outputs = training(x, y)
        assert training._compiled.program.back_end == execution
        results.append([*outputs, x, *training._compiled.state.buffers.values()])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert float(ours) == 6


def test_a_failed_forward_leaves_no_changed_copies():
    training, (x, y) = trained(Changing)
    training(x, y)
    buffers = training._compiled.state.buffers
    assert float(buffers["count"].sum()) == 6
    with pytest.raises(IndexError):
        training(x, y + 4)
    training(x, y)
    assert float(buffers["count"].sum()) == 12


def test_a_row_is_registered_once_and_names_its_option():
    with pytest.raises(ValueError, match="'foreign' is registered already"):
        register(ROW)
    with pytest.raises(ValueError, match="expected 'auto', 'loop', 'fused' or 'foreign'"):
        poptorch.Options().Emulator.replicaExecution("cuda")


def test_the_file_of_the_architecture_page_registers_a_gpu():
    page = (ROOT / "docs/architecture.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    exec(compile(code, "cuda.py", "exec"), {})
    poptorch.Options().Emulator.replicaExecution("cuda")
    if not torch.cuda.is_available():
        with pytest.raises(poptorch.Error, match=r"cuda.*not possible.*torch finds no GPU"):
            trained(Mlp, "cuda", replicas=1)


def test_the_foreign_device_is_closed():
    tensor = to_device(torch.ones(3))
    for mixed in (lambda: tensor + torch.ones(3), lambda: torch.ones(3).copy_(tensor)):
        with pytest.raises(RuntimeError, match="expected all tensors"):
            mixed()
    with pytest.raises(RuntimeError, match="numpy"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="random"):
        F.dropout(tensor)
    assert torch.equal(from_device(tensor + 1), torch.full((3,), 2.0))


def _trained_in_a_job(execution):
    """Return the back end and the weights of an instance after some steps."""
    torch.manual_seed(0)
    model = Mlp()
    options = poptorch.DistributedOptions().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    options.Emulator.set(replica_execution=execution)
    with mock.patch.object(backends, "BACKENDS", [*BACKENDS, ROW]):
        training = poptorch.trainingModel(model, options, sgd(model.parameters()))
        for step in range(3):
            training(*classified(16, seed=2 * step + popdist_py.getInstanceIndex()))
    weights = [weight.detach().tolist() for weight in model.parameters()]
    return training._compiled.program.back_end, weights


@pytest.mark.mpi
def test_instances_reduce_the_gradients_of_their_devices(instances):
    (name, expected), _ = instances.run(_trained_in_a_job, "loop")
    found = instances.run(_trained_in_a_job, "foreign")
    assert [name, *(name for name, _ in found)] == ["loop", "foreign", "foreign"]
    for _, weights in found:
        for ours, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(reference))
