"""Convolutions of recorded graphs: oneDNN computes those with kernels of one element, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.execution.replica_graphs.graph_code import function_of
from popdist_py.poptorch.execution.replica_graphs.recording import record

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
POINTWISE = {
    "images": ((4, 64, 9, 9), (96, 64, 1, 1), {}),
    "every other pixel": ((4, 64, 9, 9), (96, 64, 1, 1), {"stride": 2}),
    "padded": ((4, 64, 9, 9), (96, 64, 1, 1), {"padding": 1}),
    "grouped": ((4, 64, 9, 9), (96, 32, 1, 1), {"groups": 2}),
    "one image": ((1, 64, 33, 33), (96, 64, 1, 1), {}),
    "sequences": ((4, 64, 50), (96, 64, 1), {}),
}


def step(convolve, images, kernels):
    """Return what a convolution gives, and the gradients of its arguments."""
    images, kernels = images.detach().requires_grad_(), kernels.detach().requires_grad_()
    result = convolve(images, kernels)
    gradients = torch.autograd.grad(result.square().sum(), [images, kernels])
    return [result.detach(), *gradients]


def recorded_step(convolve, images, kernels):
    """Return the graph of a step, and what makes it."""
    captured = record(lambda *tensors: step(convolve, *tensors), [images, kernels], is_real=True)
    run = function_of(captured, 3)
    return captured.graph, lambda: run(images, kernels, None)


@pytest.mark.parametrize("case", POINTWISE)
def test_kernels_of_one_element_give_the_same_values(case):
    shape, kernel_shape, named = POINTWISE[case]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(shape, generator=generator)
    kernels = torch.randn(kernel_shape, generator=generator)
    convolve = {3: F.conv1d, 4: F.conv2d}[images.dim()]
    _, run = recorded_step(lambda *tensors: convolve(*tensors, **named), images, kernels)
    expected = step(lambda *tensors: convolve(*tensors, **named), images, kernels)
    for ours, value in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-4, atol=1e-3)
        assert ours.stride() == value.stride()


@needs_onednn
def test_kernels_of_one_element_are_left_to_onednn_with_one_thread_too():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, run = recorded_step(F.conv2d, torch.randn(4, 64, 8, 8), torch.randn(96, 64, 1, 1))
        with torch.profiler.profile() as profile:
            run()
    finally:
        torch.set_num_threads(before)
    names = {event.key for event in profile.key_averages()}
    assert "aten::mkldnn_convolution" in names
    assert not any("slow_conv" in name for name in names)


@pytest.mark.parametrize(
    ("convolve", "kernels"),
    [
        (F.conv2d, torch.randn(8, 4, 3, 3)),
        (F.conv2d, torch.randn(8, 4, 1, 3)),
        (F.conv2d, torch.randn(8, 4, 1, 1, dtype=torch.float64)),
        (F.conv_transpose2d, torch.randn(4, 8, 1, 1)),
    ],
    ids=["three by three", "one by three", "double", "transposed"],
)
def test_other_convolutions_stay_as_they_are(convolve, kernels):
    graph, _ = recorded_step(convolve, torch.randn(2, 4, 8, 8, dtype=kernels.dtype), kernels)
    found = [node for node in graph.nodes if "convolution" in str(node.target)]
    assert len(found) == 2
    assert all([2, 2] not in node.args for node in found)


class Convolution(nn.Module):
    """A model that notes in each forward pass whether torch may use NNPACK."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 16, 3)

    def forward(self, images, targets):
        USES_OF_NNPACK.append(torch._C._get_nnpack_enabled())
        return F.mse_loss(self.layer(images), targets)


USES_OF_NNPACK: list[bool] = []


def test_nnpack_is_not_used_while_a_graph_is_recorded():
    before = torch._C._get_nnpack_enabled()
    USES_OF_NNPACK.clear()
    model = Convolution()
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(torch.randn(16, 8, 8, 8), torch.randn(16, 16, 6, 6))
    assert "graph" in training._compiled.program.back_end
    assert False in USES_OF_NNPACK
    assert torch._C._get_nnpack_enabled() == before
