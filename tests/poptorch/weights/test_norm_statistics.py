"""Batch norms on several replicas: each has statistics of its own, and the host those of the first.

The numbers are compared with a loop over replicas that is written by hand here.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.models import assert_equal_weights, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

REPLICAS, ACCUMULATION, ITERATIONS, MICRO_BATCH = 4, 2, 3, 5


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.sequence_norm = nn.InstanceNorm1d(8, track_running_stats=True)
        self.last = nn.Linear(8, 2)

    def forward(self, x, y=None):
        hidden = self.norm(self.first(x))
        # Numbers that stay apart: a norm over nearly equal ones enlarges their rounding.
        sequence = torch.stack((hidden, hidden.square(), hidden.cos()), 2)
        out = self.last(self.sequence_norm(sequence)[:, :, 0])
        return out if y is None else (out, F.cross_entropy(out, y))


def batches(count, replicas=REPLICAS):
    generator = torch.Generator().manual_seed(3)
    shape = (ITERATIONS, ACCUMULATION, replicas, MICRO_BATCH)
    for _ in range(count):
        yield (
            torch.randn(*shape, 3, generator=generator),
            torch.randint(0, 2, shape, generator=generator),
        )


def wrapped(model, execution="auto", replicas=REPLICAS):
    options = quiet_options().replicationFactor(replicas).deviceIterations(ITERATIONS)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Emulator.set(replica_execution=execution)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return poptorch.trainingModel(model, options, optimizer)


def run(training, data):
    for x, y in data:
        training(x.reshape(-1, 3), y.reshape(-1))


def statistics(training):
    """Return what the norms of all local replicas changed: [replicas, ...]."""
    changed = training._compiled.executable.first_forward.modified_buffers
    return training._compiled.state.buffers_of_replicas(changed)


def trained_by_hand(model, data):
    """Train on the host; return the buffers of every replica."""
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(REPLICAS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            for step, replica in itertools.product(range(ACCUMULATION), range(REPLICAS)):
                model.load_state_dict(buffers[replica], strict=False)
                loss = model(x[iteration, step, replica], y[iteration, step, replica])[1]
                (loss / (ACCUMULATION * REPLICAS)).backward()
                buffers[replica] = copy.deepcopy(dict(model.named_buffers()))
            optimizer.step()
    return buffers


@pytest.mark.parametrize("execution", ["loop", "fused"])
def test_every_replica_keeps_its_own(execution):
    torch.manual_seed(0)
    model, reference = Normed(), Normed()
    reference.load_state_dict(model.state_dict())
    expected = trained_by_hand(reference, batches(3))
    training = wrapped(model, execution)
    run(training, batches(3))
    on_device = statistics(training)
    assert len(on_device) == 5  # an instance norm does not count its batches
    for name, rows in on_device.items():
        torch.testing.assert_close(rows, torch.stack([one[name] for one in expected]), msg=name)
    assert_equal_weights(model, reference)
    # The host gets those of replica 0, and a validation model runs with them.
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[0][name], msg=name)
    reference.load_state_dict(expected[0], strict=False)
    x = next(batches(1))[0].reshape(-1, 3)
    model.eval()
    inference = poptorch.inferenceModel(model, quiet_options().replicationFactor(2))
    torch.testing.assert_close(inference(x), reference.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_statistics_that_count_their_batches_are_no_constants():
    """``momentum=None`` weights a batch by 1 / their number, which the norm reads in Python."""
    torch.manual_seed(0)
    model = Normed()
    model.norm.momentum = None
    reference = copy.deepcopy(model)
    expected = trained_by_hand(reference, batches(2))
    with pytest.raises(poptorch.Error, match="reads buffers"):
        run(wrapped(copy.deepcopy(model), "fused"), batches(1))
    run(wrapped(model, "graph"), batches(2))
    torch.testing.assert_close(model.norm.running_mean, expected[0]["norm.running_mean"])
    torch.testing.assert_close(model.norm.running_var, expected[0]["norm.running_var"])


def test_other_buffers_are_refused_by_name():
    class Counting(Normed):
        def __init__(self):
            super().__init__()
            for name in "abcde":
                self.register_buffer(name, torch.zeros(1))

        def forward(self, x, y):
            for name in "abcde":
                getattr(self, name).add_(1)
            return super().forward(x, y)

    with pytest.raises(poptorch.Error, match=r"\(a, b, c and 2 more\).*broadcastBuffers\(False\)"):
        run(wrapped(Counting()), batches(1))


def test_a_training_goes_on_with_the_statistics_of_every_replica(tmp_path):
    torch.manual_seed(0)
    model = Normed()
    undisturbed = wrapped(copy.deepcopy(model), "loop")
    run(undisturbed, batches(4))
    first = wrapped(copy.deepcopy(model), "loop")
    run(first, batches(2))
    TrainingCheckpoints(tmp_path, first).save(2)
    second = wrapped(model, "loop")
    assert TrainingCheckpoints(tmp_path, second).resume()[0] == 2
    run(second, itertools.islice(batches(4), 2, None))
    expected = statistics(undisturbed)
    for name, rows in statistics(second).items():
        assert torch.equal(rows, expected[name]), name
    assert_equal_weights(model, undisturbed.model, rtol=0, atol=0)


@pytest.mark.parametrize(("replicas", "own"), [(2, True), (4, False)])
def test_statistics_follow_the_replicas_to_another_number_of_instances(replicas, own):
    """Two instances with one replica each save; one instance has them all, or more."""
    torch.manual_seed(0)
    saved = [wrapped(Normed(), "loop", replicas=1) for _ in range(2)]
    for number, training in enumerate(saved):
        run(training, [(x + number, y) for x, y in batches(1, replicas=1)])
    states = [training.instance_state() for training in saved]
    training = wrapped(Normed(), "loop", replicas=replicas)
    training.load_training_state(saved[0].training_state(), states)
    training.compile(*(t.flatten(0, 3) for t in next(batches(1, replicas))))
    expected = [one.model.norm.running_mean for one in saved] if own else [
        saved[0].model.norm.running_mean
    ] * replicas  # fmt: skip
    assert torch.equal(statistics(training)["norm.running_mean"], torch.stack(expected))
