"""torch.ops.poptorch: the operators do what PopTorch's Python functions do."""

from __future__ import annotations

import pytest
import torch
from support.models import inside, quiet_options
from support.repository import ROOT
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import torch_ops

native = torch.ops.poptorch
X = torch.arange(12.0).reshape(3, 4)
HINTS = {"begin_multi_conv", "end_multi_conv", "set_attribute", "clear_attribute"}
START = torch.tensor([1])
PAIRS = {
    "nop": (lambda: native.nop(X), lambda: poptorch.nop(X)),
    "recomputation_checkpoint": (
        lambda: native.recomputation_checkpoint(X),
        lambda: poptorch.recomputationCheckpoint(X),
    ),
    "set_available_memory": (
        lambda: native.set_available_memory(X, 0.3),
        lambda: poptorch.set_available_memory(X, 0.3),
    ),
    "set_matmul_serialization": (
        lambda: native.set_matmul_serialization(X @ X.T, "input_channels", 3, False),
        lambda: poptorch.serializedMatMul(
            X, X.T, poptorch.MatMulSerializationMode.InputChannels, 3
        ),
    ),
    "set_overlap_for_input": (
        lambda: native.set_overlap_for_input(X, "no_overlap"),
        lambda: poptorch.set_overlap_for_input(X, poptorch.OverlapMode.NoOverlap),
    ),
    "set_overlap_for_output": (
        lambda: native.set_overlap_for_output(X, "no_overlap"),
        lambda: poptorch.set_overlap_for_output(X, poptorch.OverlapMode.NoOverlap),
    ),
    "identity_loss": (
        lambda: native.identity_loss(X, 1),
        lambda: poptorch.identity_loss(X, "mean"),
    ),
    "dynamic_slice": (
        lambda: native.dynamic_slice(X, 1, START, 2, 1),
        lambda: poptorch.dynamic_slice(X, 1, START, 2, 1),
    ),
    "dynamic_update": (
        lambda: native.dynamic_update(X, -X[:, :2], 1, START, 2),
        lambda: poptorch.dynamic_update(X, -X[:, :2], 1, START, 2),
    ),
    "ctc_beam_search_decoder": (
        lambda: torch.cat(
            [one.flatten() for one in native.ctc_beam_search_decoder(
                X.reshape(3, 1, 4).log_softmax(2), torch.tensor([3]), 0, 4, 2
            )]
        ),
        lambda: torch.cat(
            [one.flatten() for one in poptorch.ctc_beam_search_decoder(
                X.reshape(3, 1, 4).log_softmax(2), torch.tensor([3]), 0, 4, 2
            )]
        ),
    ),
}  # fmt: skip
IN_MODELS = {
    "begin_ipu_block", "end_ipu_block", "push_name_scope", "pop_name_scope", "ipu_print_tensor",
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_an_operator_does_what_the_function_does(name):
    operator, function = PAIRS[name]
    with inside():
        assert torch.equal(operator(), function())


def test_every_operator_is_tested_and_on_the_page():
    assert set(torch_ops.OPERATORS) == {*PAIRS, *HINTS, *IN_MODELS}
    page = (ROOT / "docs" / "emulation.md").read_text(encoding="utf-8")
    assert [name for name in torch_ops.OPERATORS if f"`{name}`" not in page] == []


class Native(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        native.begin_ipu_block(0, -1, 0)
        native.push_name_scope("encoder")
        native.begin_multi_conv()
        x = native.nop(self.first(x))
        native.end_multi_conv([], [], 0)
        native.pop_name_scope()
        native.end_ipu_block()
        native.begin_ipu_block(1, -1, 1)
        native.set_attribute("__outline", "layer", "a")
        x = native.ipu_print_tensor(self.second(x), "here", True, 1000, 3, 80, 4, 2, "; ")
        native.clear_attribute("__outline", "layer")
        loss = native.identity_loss(x, 0)
        native.end_ipu_block()
        return x, loss


def test_a_model_of_operators_is_placed_named_and_trained(capfd):
    model = Native()
    before = model.second.bias.detach().clone()
    options = quiet_options()
    options.Training.gradientAccumulation(4)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(8, 4))
    assert "encoder/first/linear" in training.getTensorNames()
    assert not torch.equal(model.second.bias.detach(), before)
    printed = capfd.readouterr().err
    assert "here: (" in printed
    assert "e-01; " in printed
    assert "here_gradient: " in printed
    with pytest.raises(poptorch.Error, match="The pipeline of the model has 2 stages"):
        poptorch.inferenceModel(Native(), quiet_options())(torch.ones(1, 4))


def test_replicas_run_operators_at_once():
    model = nn.Linear(4, 2)

    class Wrapped(nn.Module):
        def forward(self, x):
            return native.nop(native.recomputation_checkpoint(model(x)))

    options = quiet_options().replicationFactor(2)
    options.Emulator.replicaExecution("fused")
    x = torch.randn(4, 4)
    torch.testing.assert_close(poptorch.inferenceModel(Wrapped(), options)(x), model(x).detach())


def test_wrong_uses_are_refused():
    with pytest.raises(poptorch.Error, match="Unexpected pop_name_scope"):
        native.pop_name_scope()
    with pytest.raises(poptorch.Error, match="float_format=7"):
        native.ipu_print_tensor(X, "", True, 1000, 3, 80, 4, 7)
    with pytest.raises(ValueError, match="sideways"):
        native.set_overlap_for_input(X, "sideways")
    assert not hasattr(native, "start_for_loop")


def test_an_operator_of_somebody_else_stays(monkeypatch):
    mine = object()
    monkeypatch.setattr(native, "nop", mine)
    torch_ops.install()
    assert native.nop is mine
