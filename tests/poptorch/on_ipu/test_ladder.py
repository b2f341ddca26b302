"""The tutorial's ResNet-101 over two IPUs in PyTorch, from out of memory to fitting.

The model is that of torchvision, with 64 x 64 images, micro-batches of 64, AdamW, and blocks and
options of PopTorch. Each expected figure has the measurement on hardware beside it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from popdist_py import poptorch

# The tests that run by default are in tests/popdist_py/ipu/test_ladder.py, with a graph made by
# hand.
pytestmark = pytest.mark.sweep
models = pytest.importorskip("torchvision.models")

BATCH = 64
# Each row has accumulation, device iterations, 8-bit input, cycles, and MiB that the first IPU
# receives.
RUNGS = [
    (3, 1, False, 60_111_417, 4.5),
    (8, 1, False, 95_653_315, 12.0),
    (8, 4, False, 283_021_420, 48.0),
    (8, 4, True, 278_393_266, 24.0),
]


class Trained(nn.Module):
    """The model with its loss, which casts 8-bit images on the IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.resnet101()
        poptorch.BeginBlock(self.model.layer3[8], ipu_id=1)
        self.dtype = torch.float32

    def forward(self, images, labels):
        logits = self.model(images.to(self.dtype))
        return logits, nn.functional.cross_entropy(logits, labels)


@pytest.fixture(scope="module")
def model():
    return Trained().train()


def wrapper_of(model, *, is_half, accumulation, iterations):
    model.dtype = torch.float16 if is_half else torch.float32
    model.to(model.dtype)
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    options.deviceIterations(iterations)
    options.showCompilationProgressBar(False)
    options.Emulator.device("mk2")
    types = {"accum_type": torch.float16, "first_order_momentum_accum_type": torch.float16}
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=1e-3, **types if is_half else {})
    return poptorch.trainingModel(model, options, optimizer)


def arguments(accumulation, iterations, dtype):
    size = BATCH * accumulation * iterations
    images = torch.empty(size, 3, 64, 64, dtype=dtype, device="meta")
    return images, torch.empty(size, dtype=torch.int64, device="meta")


def test_float_runs_out_of_memory(model):
    wrapper = wrapper_of(model, is_half=False, accumulation=3, iterations=1)
    try:
        with pytest.raises(poptorch.Error, match="Out of memory on IPU 1") as caught:
            wrapper.compile(torch.rand(3 * BATCH, 3, 64, 64), torch.zeros(3 * BATCH).long())
    finally:
        wrapper.destroy()
    assert caught.value.type == "poplar_graph_memory_allocation_error"
    advice = str(caught.value).partition("Changes that would save memory")[2].splitlines()
    assert "half precision" in advice[1]
    assert "then the model fits" in advice[1]


@pytest.mark.parametrize(("accumulation", "iterations", "is_8_bit", "theirs", "mib"), RUNGS)
def test_each_step_agrees_with_hardware(model, accumulation, iterations, is_8_bit, theirs, mib):
    wrapper = wrapper_of(model, is_half=True, accumulation=accumulation, iterations=iterations)
    given = arguments(accumulation, iterations, torch.uint8 if is_8_bit else torch.float16)
    try:
        memory = wrapper.memoryReport(*given)
        execution = wrapper.executionReport(*given).to_json()
    finally:
        wrapper.destroy()
    assert str(memory).startswith("Memory: fits on 2 mk2 IPUs")
    first, second = execution["ipus"]
    assert first["received"] == mib * 2**20
    assert second["received"] == accumulation * iterations * BATCH * 4
    assert execution["cycles"] / theirs == pytest.approx(1, abs=0.05)
