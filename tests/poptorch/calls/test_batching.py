"""The batching contract: every combination of factors against a plain PyTorch loop."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import CommGroupType, OutputMode

MODES = [OutputMode.All, OutputMode.Final, OutputMode.Sum, OutputMode.EveryN, OutputMode.Default]


class Structured(nn.Module):
    """Takes and returns nested structures; its parameter makes it trainable."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, pair, options):
        x, y = pair
        out = x * self.weight + options["shift"]
        loss = poptorch.identity_loss(out, reduction="mean")
        return {"rows": [out, y], "loss": loss, "word": "kept"}


def options_of(factors, mode, period, execution):
    iterations, accumulation, replicas = factors
    options = quiet_options().deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.replicaExecution(execution)
    return options.outputMode(mode, period if mode == OutputMode.EveryN else None)


def expected(parts, mode, period, replicas):
    """Combine per-micro-batch values, in the order [iteration][accumulation][replica]."""
    steps = [parts[i : i + replicas] for i in range(0, len(parts), replicas)]
    if mode == OutputMode.All:
        kept = steps
    elif mode == OutputMode.EveryN:
        kept = steps[period - 1 :: period]
    elif mode == OutputMode.Sum:
        kept = [[sum(column[1:], column[0]) for column in zip(*steps, strict=True)]]
    else:
        kept = steps[-1:]
    flat = [part for step in kept for part in step]
    if len(flat) == 1:
        return flat[0]
    return torch.stack(flat) if flat[0].dim() == 0 else torch.cat(flat)


@given(
    mb=st.integers(1, 3),
    factors=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    mode=st.sampled_from(MODES),
    execution=st.sampled_from(["loop", "auto"]),
    data=st.data(),
)
def test_training_returns_what_the_table_says(mb, factors, mode, execution, data):
    iterations, accumulation, replicas = factors
    period = data.draw(
        st.sampled_from([n for n in range(1, iterations + 1) if iterations % n == 0])
    )
    model = Structured()
    training = poptorch.trainingModel(
        model,
        options_of(factors, mode, period, execution),
        torch.optim.SGD(model.parameters(), lr=0.0),
    )
    rows = mb * iterations * accumulation * replicas
    x = torch.arange(float(rows * 2)).reshape(rows, 2)
    y = torch.arange(rows)
    shift = torch.linspace(0, 1, rows)[:, None]
    result = training((x, y), {"shift": shift})
    outs = [(2 * x + shift)[i : i + mb] for i in range(0, rows, mb)]
    ids = [y[i : i + mb].int() for i in range(0, rows, mb)]
    if mode == OutputMode.Default:
        mode = OutputMode.Final
    torch.testing.assert_close(result["rows"][0], expected(outs, mode, period, replicas))
    assert torch.equal(result["rows"][1], expected(ids, mode, period, replicas))
    losses = expected([out.mean() for out in outs], mode, period, replicas)
    torch.testing.assert_close(result["loss"], losses)
    assert result["word"] == "kept"


@pytest.mark.parametrize(
    ("mode", "rows", "entries"),
    [
        (OutputMode.All, 48, 24),
        (OutputMode.EveryN, 16, 8),
        (OutputMode.Final, 4, 2),
        (OutputMode.Sum, 4, 2),
    ],
)
def test_the_documented_example(mode, rows, entries):
    options = options_of((3, 4, 2), mode, 3, "loop")
    model = Mlp()
    out, loss = poptorch.trainingModel(model, options)(*classified(48))
    assert out.shape == (rows, 4)
    assert loss.shape == (entries,)


@settings(max_examples=20)
@given(
    factors=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    mb=st.integers(1, 2),
    reduction=st.sampled_from([poptorch.ReductionType.Mean, poptorch.ReductionType.Sum]),
)
def test_weights_follow_a_plain_loop(factors, mb, reduction):
    iterations, accumulation, replicas = factors
    torch.manual_seed(0)
    model = Mlp().double()
    reference = copy.deepcopy(model)
    options = options_of(factors, OutputMode.Default, 1, "loop")
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.Emulator.doublePrecision()
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    window = mb * accumulation * replicas
    x, y = classified(window * iterations, dtype=torch.float64)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    factor = 1 if reduction == poptorch.ReductionType.Mean else accumulation * replicas
    for _ in range(2):
        training(x, y)
        for start in range(0, len(x), window):
            optimizer.zero_grad()
            loss = reference(x[start : start + window], y[start : start + window])[1]
            (loss * factor).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("execution", ["loop", "fused"])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [(CommGroupType.Consecutive, [0, 0, 1, 1]), (CommGroupType.Orthogonal, [0, 1, 0, 1])],
)
def test_replicas_of_a_group_share_inputs(kind, groups, execution):
    options = quiet_options().replicationFactor(4).inputReplicaGrouping(2, kind)
    options.Emulator.replicaExecution(execution)
    inference = poptorch.inferenceModel(lambda x: x * 2, options)
    x = torch.tensor([1.0, 10.0])
    assert inference(x).tolist() == [2 * x[group].item() for group in groups]


def test_a_size_that_does_not_fit_is_refused():
    options = quiet_options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(Mlp(), options)
    with pytest.raises(AssertionError, match=r"Invalid batch dimension.*\(13\).*12"):
        training(*classified(13))


def test_a_scalar_counts_as_one_row():
    inference = poptorch.inferenceModel(lambda x, s: x + s, quiet_options())
    assert inference(torch.ones(3), torch.tensor(2.0)).tolist() == [3, 3, 3]
    several = poptorch.inferenceModel(lambda x, s: x + s, quiet_options().deviceIterations(2))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        several(torch.ones(4), torch.tensor(2.0))


def test_inference_returns_everything_and_does_not_accumulate():
    inference = poptorch.inferenceModel(Mlp(), quiet_options().deviceIterations(3))
    assert inference(classified(6)[0]).shape == (6, 4)
    options = quiet_options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match="gradientAccumulation"):
        poptorch.inferenceModel(Mlp(), options)


def test_the_period_of_every_n_divides_the_iterations():
    options = quiet_options().deviceIterations(4).outputMode(OutputMode.EveryN, 3)
    with pytest.raises(poptorch.Error, match=r"output_return_period is 3, .*deviceIterations\(4\)"):
        poptorch.inferenceModel(Mlp(), options)(classified(4)[0])


CONSECUTIVE, ORTHOGONAL = CommGroupType.Consecutive, CommGroupType.Orthogonal


@pytest.mark.parametrize(
    ("replicas", "group_size", "kind", "rows_of_replicas"),
    [
        (1, 1, CONSECUTIVE, [[0, 1]]),
        (2, 1, CONSECUTIVE, [[0, 1], [2, 3]]),
        (2, 2, CONSECUTIVE, [[0, 1], [0, 1]]),
        (4, 2, CONSECUTIVE, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, 2, ORTHOGONAL, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (6, 2, ORTHOGONAL, [[0, 1], [2, 3], [4, 5]] * 2),
        (6, 3, ORTHOGONAL, [[0, 1], [2, 3]] * 3),
    ],
)
def test_replicas_get_the_rows_of_their_group(replicas, group_size, kind, rows_of_replicas):
    options = quiet_options().replicationFactor(replicas).inputReplicaGrouping(group_size, kind)
    options.deviceIterations(3)
    options.Training.gradientAccumulation(2)
    batching = options.batching(training=True)
    rows = torch.arange(2 * batching.num_slices)
    assert batching.micro_batch(rows.shape) == 2
    combined = [rows for (rows,) in batching.combined_micro_batches([rows])]
    assert [part.tolist() for part in combined] == rows.view(6, -1).tolist()
    offset = combined[4][0].item()
    for cut in (
        batching.per_replica(combined[4]),
        batching.stacked(combined[4]),
        [tensors[0] for tensors in batching.inputs_of_replicas([combined[4]])],
    ):
        assert [(part - offset).tolist() for part in cut] == rows_of_replicas


def test_training_returns_the_last_outputs_and_inference_all():
    options = quiet_options()
    assert options.batching(training=True).output_mode == OutputMode.Final
    assert options.batching(training=False).output_mode == OutputMode.All
