"""The order of a tensor in the host's memory changes nothing: the device has its own."""

from __future__ import annotations

import pytest
import torch

from popdist_py import poptorch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Conv2d(3, 4, 3)
        self.loss = torch.nn.MSELoss()

    def forward(self, x, y):
        means = self.body(x).float().mean((2, 3))
        return means, self.loss(means, y)


def strided(value):
    """Return equal values whose memory is in another order."""
    if isinstance(value, dict):
        return {key: strided(each) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return value.transpose(0, 1).contiguous().transpose(0, 1)


def trained(make_optimizer, *, half=False, change_weights=False, change_state=False):
    """Return the weights after some steps, an upload and a load in between."""
    torch.manual_seed(1)
    net, x, y = Net(), torch.randn(4, 3, 8, 8), torch.randn(4, 4)
    if half:
        net, x = net.half(), x.half()
    if change_weights:
        net.to(memory_format=torch.channels_last)
    options = poptorch.Options().randomSeed(1)
    optimizer = make_optimizer(net.parameters())
    model = poptorch.trainingModel(net, options, optimizer)
    model(x, y)
    model.copyWeightsToHost()
    model.copyWeightsToDevice()
    state = optimizer.state_dict()
    optimizer.load_state_dict(strided(state) if change_state else state)
    model.setOptimizer(optimizer)
    for _ in range(2):
        model(x, y)
    model.detachFromDevice()
    return net.body.weight.detach().contiguous()


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: poptorch.optim.SGD(params, lr=0.1),
        lambda params: poptorch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: poptorch.optim.Adam(params, lr=0.01),
    ],
    ids=["SGD", "SGD with momentum", "Adam"],
)
def test_memory_order_of_weights_and_state_changes_no_bit(make_optimizer, half):
    expected = trained(make_optimizer, half=half)
    for change in ("change_weights", "change_state"):
        assert torch.equal(trained(make_optimizer, half=half, **{change: True}), expected), change
