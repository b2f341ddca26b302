"""Synthetic data: the device makes its inputs, and sends nothing back but shapes."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Mlp, assert_equal_weights, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.popart import SyntheticDataMode
from popdist_py.poptorch.calls.synthetic_data import SyntheticTransfer

DI, GA, REPLICAS, MICRO = 3, 2, 2, 4


def options(mode=None, *, di=DI, ga=GA, replicas=REPLICAS, how="loop"):
    made = quiet_options().deviceIterations(di).replicationFactor(replicas).randomSeed(1)
    made.Training.gradientAccumulation(ga)
    made.Emulator.replicaExecution(how)
    if mode is not None:
        made._Popart.set("syntheticDataMode", mode)
    return made


def nothing(samples):
    """Inputs that cannot be read: they have no data."""
    return (
        torch.empty(samples, 6, device="meta"),
        torch.empty(samples, dtype=torch.int64, device="meta"),
    )


def made_inputs(mode, inputs):
    transfer = SyntheticTransfer(SyntheticDataMode(mode), double_precision=False)
    return transfer.inputs(inputs, widen_integers=False)


@pytest.mark.parametrize("how", ["loop", "fused", "auto"])
@pytest.mark.parametrize(
    "output",
    [
        poptorch.OutputMode.Final,
        poptorch.OutputMode.All,
        poptorch.OutputMode.Sum,
        poptorch.OutputMode.EveryN,
    ],
)
def test_shapes_are_those_of_real_data_and_inputs_are_not_read(output, how):
    samples = MICRO * DI * GA * REPLICAS
    results = []
    for mode, inputs in ((None, classified(samples)), (2, nothing(samples))):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = options(mode, how=how).outputMode(output, DI)
        training = poptorch.trainingModel(model, made, optimizer)
        results.append([training(*inputs) for _ in range(2)])
    for real, synthetic in zip(*results, strict=True):
        for ours, theirs in zip(synthetic, real, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert not ours.any()


def test_every_call_has_results_of_its_own():
    inference = poptorch.inferenceModel(nn.Linear(6, 2), options(1, ga=1))
    first = inference(nothing(24)[0])
    first += 1
    assert first.shape == (24, 2)
    assert not inference(nothing(24)[0]).any()


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_weights_are_trained_on_what_the_device_made(mode):
    samples = MICRO * DI * GA * REPLICAS
    model = Mlp()
    reference = copy.deepcopy(model)
    inputs = made_inputs(mode, nothing(samples))
    for wrapped, given, data in ((model, mode, nothing(samples)), (reference, None, inputs)):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        training = poptorch.trainingModel(wrapped, options(given), optimizer)
        for _ in range(2):
            training(*data)
    assert_equal_weights(model, reference)


def test_what_the_device_makes():
    inputs = [
        torch.empty(10000, device="meta"),
        torch.empty(10000, dtype=torch.float16, device="meta"),
        torch.empty(10000, dtype=torch.int64, device="meta"),
        torch.empty(10000, dtype=torch.bool, device="meta"),
    ]
    before = torch.get_rng_state()
    for mode, low, high, mean in ((1, 0, 0, 0), (2, -6, 6, 0), (3, 0, 1, 0.5)):
        single, half, whole, flags = made_inputs(mode, inputs)
        for floats in (single, half.float()):
            assert low <= floats.min() <= floats.max() <= high
            assert floats.mean().item() == pytest.approx(mean, abs=0.05)
            assert (mode == 1) == (floats.std().item() == 0)
        assert not whole.any()
        assert not flags.any()
        dtypes = [made.dtype for made in (single, half, whole, flags)]
        assert dtypes == [torch.float32, torch.float16, torch.int64, torch.bool]
    assert torch.equal(torch.get_rng_state(), before)


class Doubles(nn.Module):
    def forward(self, x):
        x *= 2
        return x.sum(1)


def test_inputs_that_the_forward_changes_stay_the_programs():
    x = torch.ones(4, 6)
    inference = poptorch.inferenceModel(Doubles(), options(1, di=1, ga=1))
    for _ in range(2):
        assert inference(x).shape == (4,)
    assert (x == 1).all()


def test_structures_constants_and_indices():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 2)

        def forward(self, batch, scale):
            return {"rows": self.table(batch["index"]) * scale, "scale": scale}

    index = torch.empty(12, dtype=torch.int64, device="meta")
    out = poptorch.inferenceModel(Looks(), options(2, ga=1))({"index": index}, 3)
    assert (out["rows"].shape, out["scale"]) == ((12, 2), 3)


def test_the_mode_that_a_setter_chooses():
    made = quiet_options().enableSyntheticData(True)
    assert made._Popart.options["syntheticDataMode"] == 2
    assert made.synthetic_mode == SyntheticDataMode.RandomNormal
    assert quiet_options().enableSyntheticData(False).synthetic_mode == SyntheticDataMode.Off


@pytest.mark.parametrize("mode", ["zeros", 4, [1]])
def test_other_modes_are_refused(mode):
    with pytest.raises(poptorch.Error, match=r"syntheticDataMode is .*0 \(Off\), 1 \(Zeros\)"):
        poptorch.inferenceModel(nn.Linear(1, 1), options(mode, ga=1))


def test_a_loader_still_gives_its_batches():
    made = options(2)
    data = torch.utils.data.TensorDataset(*classified(100))
    loader = poptorch.DataLoader(made, data, batch_size=MICRO)
    training = poptorch.trainingModel(Mlp(), made)
    batches = [(x.clone(), training(x, y)) for x, y in loader]
    assert len(batches) == len(loader) == 2
    assert torch.equal(batches[0][0], data.tensors[0][:48])
    assert all(loss.shape == (REPLICAS,) for _, (_, loss) in batches)
