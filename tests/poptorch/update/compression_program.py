"""Training with compressed gradients; run by test_compressed_training.py as if on several hosts.

Arguments: ways of joining, ``A=1,B=2``. With TEST_BRIEFLY=1 fewer combinations are checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "popdist_py" / "collectives"))

import numpy as np
import pytest
import torch
from jobs import ways
from torch import nn

import popdist_py
from popdist_py import context, poptorch
from popdist_py.errors import CollectiveMismatchError
from popdist_py.poptorch.checkpoint import TrainingCheckpoints
from popdist_py.poptorch.update import gradient_buckets

COUNT, ME = popdist_py.getNumInstances(), popdist_py.getInstanceIndex()
MICRO_BATCH, WIDTH, STEPS = 8, 40, 20
POWER_SGD = ("powersgd", 2, 3)
BRIEFLY = "TEST_BRIEFLY"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(30, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 30))

    def forward(self, x, y):
        out = self.body(x)
        return out, poptorch.identity_loss(((out - y) ** 2).mean(), reduction="none")


def data(steps=STEPS):
    """What one teacher says of inputs that every instance has others of."""
    torch.manual_seed(5)
    teacher = torch.randn(30, 30) / 5
    x = torch.randn(steps, COUNT, MICRO_BATCH, 30)[:, ME]
    return x, torch.tanh(x @ teacher)


def model_with(*compression, half=False, change=None, **settings):
    net = Net()
    options = poptorch.Options()
    options.Distributed.configureProcessId(ME, COUNT)
    options.showCompilationProgressBar(False)
    options.Emulator.replicaExecution("loop")
    if compression:
        options.Training.gradientCompression(*compression)
    if change is not None:
        change(options)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5, **settings)
    return poptorch.trainingModel(net.half() if half else net, options, optimizer=optimizer)


def train(model, batches, kind=torch.float32):
    return [float(model(x.to(kind), y.to(kind))[1]) for x, y in zip(*batches, strict=True)]


def weights(model):
    model.copyWeightsToHostIfNeeded()
    return np.concatenate([p.detach().float().numpy().ravel() for p in model.model.parameters()])


def trained(*compression, **changes):
    """Train; return the weights, equal on all instances, and the losses of this one."""
    model = model_with(*compression, **changes)
    losses = train(model, data(), torch.float16 if changes.get("half") else torch.float32)
    own = weights(model)
    everybody = context.communicator().all_gather(own)
    assert (everybody.view(np.uint32) == own.view(np.uint32)).all(), compression
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3]), (compression, losses)
    model.destroy()
    return own


def check_all_instances_have_the_same_weights():
    plain = trained()
    for overlap in ("1",) if BRIEFLY in os.environ else ("0", "1"):
        with mock.patch.dict(os.environ, POPDIST_GRADIENT_OVERLAP=overlap):
            assert np.array_equal(trained("none"), plain)
            for method, distance in ((("fp16",), 1e-3), (POWER_SGD, 0.7), (("bf16",), 1e-2)):
                away = np.linalg.norm(trained(*method) - plain) / np.linalg.norm(plain)
                assert 0 < away < distance, (method, away)


def check_halves_and_scaled_losses():
    def adaptive(options):
        options.Training.setAutomaticLossScaling(True)

    for method in () if BRIEFLY in os.environ else (("fp16",), POWER_SGD):
        for changes in (
            {"half": True, "loss_scaling": 128.0},
            {"half": True, "accum_type": torch.float16},
            {"change": adaptive},
        ):
            assert np.isfinite(trained(*method, **changes)).all()


def check_a_resumed_training_goes_on_as_it_would_have():
    x, y = data()
    folder = popdist_py.broadcast(tempfile.mkdtemp() if ME == 0 else None)
    for number, method in enumerate((("fp16",), POWER_SGD)):
        model = model_with(*method)
        files = TrainingCheckpoints(f"{folder}/{number}", model)
        train(model, (x[:5], y[:5]))
        files.save(5)
        train(model, (x[5:], y[5:]))
        expected = weights(model)
        model.destroy()
        resumed = model_with(*method)
        files = TrainingCheckpoints(f"{folder}/{number}", resumed)
        assert files.resume()[0] == 5
        train(resumed, (x[5:], y[5:]))
        assert np.array_equal(weights(resumed), expected), method
        resumed.destroy()
    # A training that compresses otherwise goes on too, without what was left out.
    other = model_with("fp16")
    TrainingCheckpoints(f"{folder}/1", other).resume()
    train(other, (x[5:], y[5:]))
    assert np.isfinite(weights(other)).all()
    other.destroy()


def check_another_optimizer_of_the_same_parameters_goes_on():
    def compressions(model):
        return model._compiled.program.training.compression._made

    x, y = data(7)
    for method in (("fp16",), POWER_SGD):
        model = model_with(*method)
        train(model, (x[:5], y[:5]))
        before = [(c.state(), f.state()) for c, f, _ in compressions(model)]
        old = compressions(model)
        assert ME or any(left["values"] for _, left in before)  # the others may own nothing
        for change in ({"lr": 0.2}, {"lr": 0.2, "momentum": 0.5}):
            model.setOptimizer(poptorch.optim.SGD(model.model.parameters(), **change))
        assert compressions(model) is not old
        for (compression, feedback, _), (was, left) in zip(
            compressions(model), before, strict=True
        ):
            assert compression.state().get("steps") == was.get("steps")
            for number, factor in was.get("factors", {}).items():
                assert torch.equal(compression.state()["factors"][number], factor)
            for (start, own), (wanted, other) in zip(
                feedback.state()["values"], left["values"], strict=True
            ):
                assert start == wanted
                assert torch.equal(own, other)
        train(model, (x[5:], y[5:]))
        # What belongs to other parameters does not go on.
        some = list(model.model.parameters())[:2]
        model.setOptimizer(poptorch.optim.SGD(some, lr=0.2))
        assert not any(feedback.state()["values"] for _, feedback, _ in compressions(model))
        model.destroy()


def check_refusals():
    model = model_with("fp16", change=lambda o: o.Emulator.deterministicReduction())
    with pytest.raises(
        poptorch.Error, match=r"'fp16'.* cannot be used with deterministicReduction"
    ):
        train(model, data(1))
    with pytest.raises(
        CollectiveMismatchError,
        match=r"instance 0 called Options.Training.gradientCompression\('powersgd', rank=2, "
        r".*called Options.Training.gradientCompression\('fp16'\)",
    ):
        train(model_with(*(POWER_SGD if ME == 0 else ("fp16",))), data(1))


def main():
    torch.set_num_threads(1)
    gradient_buckets._BUCKET_BYTES = 4000  # several buckets, one started before another is finished
    for way, comm in ways(sys.argv[1:]):
        check_all_instances_have_the_same_weights()
        check_halves_and_scaled_losses()
        check_a_resumed_training_goes_on_as_it_would_have()
        check_another_optimizer_of_the_same_parameters_goes_on()
        check_refusals()
        mesh = type(comm._slice_owners.mesh).__name__
        print(f"[{way}] {len(comm.host_links.hosts)} hosts, {mesh}")


main()
