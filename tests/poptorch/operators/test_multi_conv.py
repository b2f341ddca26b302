"""MultiConv: no number changes; settings are checked."""

import pytest
import torch
from support.models import inside, quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch import ops
from popdist_py.poptorch.enums import (
    MultiConvPlanType,
)
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options import options_without_effect


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


class Convolution(nn.Module):
    """A model of one convolution, in the MultiConv that ``make`` returns."""

    def __init__(self, make):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.make = make

    def forward(self, x):
        with self.make():
            return self.conv(x)


def test_settings_are_warned_of_once_by_instance_0(caplog, monkeypatch):
    monkeypatch.setattr(options_without_effect, "_said", set())
    some = Convolution(lambda: ops.MultiConv().availableMemoryProportions(0.1).cycleBackOff(0.1))
    none = Convolution(lambda: ops.MultiConv().planType(None))
    for model, process in ((some, 1), (none, 0), (some, 0), (some, 0)):
        options = quiet_options()
        options.Distributed.configureProcessId(process, 2)
        poptorch.inferenceModel(model, options).compile(torch.ones(1, 2, 8, 8))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING",
         "These options change only the speed or memory of real IPUs, not of emulated IPUs: "
         "MultiConv.availableMemoryProportions, MultiConv.cycleBackOff")
    ]  # fmt: skip


def test_settings_of_a_cached_executable_are_warned_of(caplog, monkeypatch, tmp_path):
    model = Convolution(lambda: ops.MultiConv().perConvReservedTiles(10))
    for _ in range(2):
        monkeypatch.setattr(options_without_effect, "_said", set())
        options = quiet_options().enableExecutableCaching(str(tmp_path))
        poptorch.inferenceModel(model, options).compile(torch.ones(1, 2, 8, 8))
    text = "These options change only the speed or memory of real IPUs, not of emulated IPUs: "
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warned == [text + "MultiConv.perConvReservedTiles"] * 2


def test_multi_conv_counts_its_convolutions(conv):
    def run(multi, count):
        with inside(), multi:
            for _ in range(count):
                conv(torch.ones(1, 2, 8, 8))

    with pytest.raises(Error, match="2 convolutions, but its setting availableMem"):
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
    with pytest.raises(error, match="is not valid"):
        getattr(ops.MultiConv(), method)(value)
