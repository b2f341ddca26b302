"""Operator limits: what a program may not do on the device is refused while it is compiled."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from popdist_py.poptorch import ops
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.placement.execution_strategies import PipelinedExecution
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self, forward, part=None):
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4))
        self._run = forward

    def forward(self, x):
        return self._run(self, x)


def trace(forward, x, part=None):
    model = Model(forward, part)
    blocks = BlockRecorder(PipelinedExecution(), model, [x])
    with ForwardWatch(blocks=blocks).following():
        return model(x)


IMAGE = torch.rand(1, 2, 4, 4)
LINE = torch.rand(4)
INDICES = torch.tensor([0, 2, 1])


@pytest.mark.parametrize(
    ("forward", "x", "message"),
    [
        (lambda _, x: F.interpolate(x, scale_factor=2, mode="linear"), IMAGE[0], "mode 'nearest"),
        (lambda _, x: F.interpolate(x, None, 2, "trilinear"), IMAGE[None], "mode 'nearest"),
        (lambda _, x: F.one_hot(x), INDICES, "num_classes"),
        (lambda _, x: torch.bincount(x), INDICES, "minlength"),
        (lambda _, x: x.bincount(), INDICES, "minlength"),
        (lambda _, x: F.max_pool2d(x, 2, return_indices=True), IMAGE, "return_indices"),
        (lambda _, x: F.adaptive_max_pool2d(x, 2, return_indices=True), IMAGE, "return_indices"),
        (lambda _, x: torch.topk(x, 2, sorted=False), LINE, "sorted=False"),
        (lambda _, x: x.topk(2, 0, True, False), LINE, "sorted=False"),
        (lambda _, x: F.ctc_loss(x, INDICES[None, 1:], (4,), (2,), reduction="none"),
         torch.rand(4, 1, 3), "reduction"),
        (lambda _, x: F.ctc_loss(x, INDICES[1:], (4,), (2,)), torch.rand(4, 1, 3), "2-D"),
        (lambda _, x: x.item(), LINE[0], "value of a tensor"),
        (lambda _, x: (x * 2).sum().tolist(), LINE, "value of a tensor"),
        (lambda _, x: 1 if x.sum() > 0 else 2, LINE, "Python condition"),
        (lambda m, x: x if m.weight[0] else -x, LINE, "Python condition"),
        (lambda _, x: float(x), LINE[0], "float"),
        (lambda _, x: LINE[: x[0]], INDICES, "dynamic_slice"),
        (lambda _, x: x[x > 0.5], LINE, "boolean mask"),
        (lambda _, x: x.masked_select(x > 0.5), LINE, "masked_select"),
        (lambda _, x: torch.nonzero(x), LINE, "nonzero"),
        (lambda _, x: torch.where(x > 0.5), LINE, "only a condition"),
        (lambda _, x: x.clone().__setitem__(slice(0, 4, 2), 1.0), LINE, "step other than 1"),
        (lambda m, x: (m.weight * x).sum().backward(), LINE, "cannot be called explicitly"),
    ],
)  # fmt: skip
def test_what_the_device_lacks(forward, x, message):
    with pytest.raises(Error, match=message):
        trace(forward, x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LSTM(4, 4, num_layers=2), "one layer"),
        (nn.LSTM(4, 4, bidirectional=True), "bidirectional"),
        (nn.LSTM(4, 4, bias=False), "bias=False"),
        (nn.GRU(4, 4, num_layers=3), "one layer"),
        (nn.RNN(4, 4, bias=False), "bias=False"),
    ],
)
def test_recurrent_layers_that_the_device_lacks(layer, message):
    with pytest.raises(Error, match=message):
        trace(lambda model, x: model.part(x), torch.rand(3, 2, 4), part=layer)


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4), nn.GRU(4, 4, bias=False), nn.RNN(4, 4)])
def test_recurrent_layers_that_it_has(layer):
    trace(lambda model, x: model.part(x), torch.rand(3, 2, 4), part=layer)


def masked_assignment(_, x):
    y = x.clone()
    y[y > 0.5] = 0.0
    y[1:3] = 2.0
    return y


def on_the_host(_, x):
    return ops.CPU(lambda t: torch.tensor(t.sum().item()), "host")(x)


@pytest.mark.parametrize(
    "forward",
    [
        masked_assignment,
        on_the_host,
        lambda _, x: torch.where(x > 0.5, x, -x),
        lambda _, x: F.max_pool1d(x[None], 2),
        lambda _, x: torch.topk(x, 2),
        lambda _, x: F.one_hot(x.long(), 5),
        lambda _, x: torch.bincount(x.long(), minlength=3),
        lambda _, x: x[INDICES],
        lambda _, x: x * (1 if x.shape[0] > 2 else 2),
        # Values that are known while compiling: constants and buffers.
        lambda model, x: x * model.table.sum().item() if torch.ones(1) > 0 else x,
        lambda _, x: ops.ctc_beam_search_decoder(
            x.reshape(2, 1, 2).log_softmax(-1), torch.tensor([2])
        ),
    ],
)
def test_what_is_allowed(forward):
    trace(forward, LINE.clone())
