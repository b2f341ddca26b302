"""MultiConv: no number changes; settings are checked."""

import logging

import pytest
import torch
from support.models import inside
from torch import nn

from popdist_py.poptorch import ops
from popdist_py.poptorch.enums import (
    MultiConvPlanType,
)
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.operators import multi_conv


@pytest.fixture
def conv():
    return nn.Conv2d(2, 2, 3)


def test_multi_conv_changes_no_number(conv):
    x = torch.randn(1, 2, 8, 8)
    for proportions in (0.5, [0.5, 0.25]):
        multi = ops.MultiConv().availableMemoryProportions(proportions).partialsTypes(torch.half)
        multi.planType(MultiConvPlanType.Serial).perConvReservedTiles(10).cycleBackOff(0.1)
        with inside(), multi.enableConvDithering(True):
            results = (conv(x), conv(x * 2))
        assert all(map(torch.equal, results, (conv(x), conv(x * 2))))


def test_settings_that_change_hardware_only_are_named_once(conv, caplog, monkeypatch):
    monkeypatch.setattr(multi_conv, "_said", set())
    caplog.set_level(logging.INFO, logger="poptorch::python")
    for _ in range(2):
        with inside(), ops.MultiConv().availableMemoryProportions(0.1).cycleBackOff(0.1):
            conv(torch.ones(1, 2, 8, 8))
    with inside(), ops.MultiConv():
        conv(torch.ones(1, 2, 8, 8))
    assert [record.getMessage() for record in caplog.records] == [
        "These settings of MultiConv change the speed or memory of hardware only: available memory "
        "proportions, cycle back off"
    ]


def test_multi_conv_counts_its_convolutions(conv):
    def run(multi, count):
        with inside(), multi:
            for _ in range(count):
                conv(torch.ones(1, 2, 8, 8))

    with pytest.raises(Error, match="2 convolutions but 3 available memory"):
        run(ops.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]), 2)
    with pytest.raises(Error, match="Unexpected end_multi_conv"):
        run(ops.MultiConv(), 0)
    run(ops.MultiConv(), 1)  # the errors before left nothing behind


def test_multi_convs_cannot_be_nested():
    with (
        inside(),
        pytest.raises(Error, match=r"Nested poptorch.MultiConv is not supported"),
        ops.MultiConv(),
        ops.MultiConv(),
    ):
        pass
    with ops.MultiConv(), ops.MultiConv():
        pass  # on the host it does nothing


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [
        ("availableMemoryProportions", "0.1", AssertionError),
        ("availableMemoryProportions", [0.1, "0.2"], AssertionError),
        ("planType", 0, AssertionError),
        ("partialsTypes", torch.int, ValueError),
        ("partialsTypes", [torch.half, "half"], ValueError),
        ("enableConvDithering", "yes", ValueError),
        ("enableConvDithering", [True, 1], ValueError),
    ],
)
def test_multi_conv_settings(method, value, error):
    with pytest.raises(error, match="Invalid"):
        getattr(ops.MultiConv(), method)(value)
