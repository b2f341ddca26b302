"""Graphs of models with stages, marks or frozen weights: stages, kept tensors, shared memory."""

from __future__ import annotations

import pytest
import torch
from poptorch.on_ipu.forward_models import Bert, Mlp, WithLoss
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.runs.forward_steps import Forward, Step, Value
from popdist_py.ipu.runs.graph_of_steps import graph_of_steps
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model

ARGS = (torch.rand(48, 20), torch.zeros(48, dtype=torch.int64))
WIDTHS = (20, 30, 30, 30, 30, 10)


def pipelined(strategy=None):
    options = quiet_options()
    options.Training.gradientAccumulation(8)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    return options


def operations(found):
    return {operation.name: operation for operation in found.graph.operations}


@pytest.mark.parametrize(
    ("before", "ipus"),
    [
        ({2: 1}, (0, 1)),
        ({2: 1, 4: 2, 6: 3}, (0, 1, 2, 3)),
        # If a model returns to an IPU, it has a further stage there. Neighbouring blocks on the
        # same IPU become one stage.
        ({2: 1, 4: 0}, (0, 1, 0)),
        ({2: 0, 4: 1, 6: 1}, (0, 1)),
    ],
)
def test_a_stage_begins_where_the_ipu_changes(before, ipus):
    model = WithLoss(Mlp(WIDTHS))
    for layer, ipu in before.items():
        poptorch.BeginBlock(model.model.layers[layer], ipu_id=ipu)
    found = graph_of_model(model, pipelined(), ARGS, training=True)
    assert found.placement.ipus == ipus
    first = {}
    for operation, stage in zip(found.graph.operations, found.placement.stages, strict=True):
        first.setdefault(stage, operation.name)
    assert len(first) == len(ipus)
    assert set(list(first.values())[1:]) <= {f"model.layers.{layer}" for layer in before}


def test_phases_that_share_ipus_are_stages():
    model = WithLoss(Mlp(WIDTHS))
    for layer in (0, 4, 8):
        poptorch.BeginBlock(model.model.layers[layer], f"b{layer}")
    strategy = poptorch.SerialPhasedExecution("b0", "b4", "b8")
    found = graph_of_model(model, pipelined(strategy), ARGS, training=True)
    assert found.placement.ipus == (0, 0, 0)
    strategy = poptorch.ParallelPhasedExecution("b0", "b4", "b8")
    found = graph_of_model(model, pipelined(strategy), ARGS, training=True)
    assert found.placement.ipus == (0, 1, 0)


class Cut(nn.Module):
    """A model with an in-place operation and a view on both sides of a stage's beginning."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(10, 10)

    def forward(self, x, labels):
        x = self.first(x)
        poptorch.Block.start(ipu_id=1)
        x = x.add_(1)
        x = x.mul_(2)
        part = x[:, :10]
        poptorch.Block.start(ipu_id=0)
        return nn.functional.cross_entropy(self.second(part[:, :10]), labels)


def test_no_operation_overwrites_memory_of_another_stage():
    found = graph_of_model(Cut(), pipelined(), ARGS, training=True)
    stage_of = {
        operation.output.name: stage
        for operation, stage in zip(found.graph.operations, found.placement.stages, strict=True)
    }
    for name, root in found.graph.root_of.items():
        assert stage_of.get(name, 0) == stage_of.get(root, 0)
    by_name = operations(found)
    assert not by_name["add"].is_in_place
    assert by_name["mul"].is_in_place
    assert by_name["slice"].kind == "view"
    assert found.graph.tensors["slice:out"].elements == 10


def test_a_view_of_another_stages_tensor_is_a_copy():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 20), nn.Linear(10, 10)

        def forward(self, x, labels):
            x = self.first(x)
            poptorch.Block.start(ipu_id=1)
            return nn.functional.cross_entropy(self.second(x[:, :10]), labels)

    found = graph_of_model(Viewing(), pipelined(), ARGS, training=True)
    assert operations(found)["slice"].kind == "elementwise"
    assert found.graph.root_of["slice:out"] == "slice:out"


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 24), nn.Linear(24, 10, bias=False)
        self.register_buffer("scale", torch.ones(24))
        self.register_buffer("unused", torch.ones(24))

    def forward(self, x, labels):
        x = poptorch.recomputationCheckpoint(self.first(x))
        x = torch.relu(x) * self.scale
        mode = poptorch.MatMulSerializationMode.OutputChannels
        x = poptorch.serializedMatMul(x, self.second.weight.t(), mode, 5)
        x = poptorch.set_available_memory(x, 0.1)
        return nn.functional.cross_entropy(x, labels)


def test_marks_become_settings_of_their_operations():
    graph = graph_of_model(Marked(), quiet_options(), ARGS, training=True).graph
    by_name = {operation.name: operation for operation in graph.operations}
    assert [name for name, one in by_name.items() if one.is_checkpoint] == ["first"]
    # The backward pass reads the checkpoint, so no later operation overwrites it.
    assert not by_name["relu"].is_in_place
    assert by_name["mm"].product.serial == 5
    own = {name: one.memory_proportion for name, one in by_name.items() if one.memory_proportion}
    assert own == {"mm": 0.1}
    assert graph.weight_of["scale"].is_trained is False
    assert "unused" not in graph.weight_of


class Present(nn.Module):
    """A layer that marks an intermediate tensor (its key) as a checkpoint, as transformers do."""

    def __init__(self, later):
        super().__init__()
        self.key, self.out, self.later = nn.Linear(20, 20), nn.Linear(20, 10), later

    def forward(self, x, labels):
        key = self.key(x)
        x = self.out(torch.tanh(key))
        key = poptorch.recomputationCheckpoint(key)
        if self.later == "view":
            x = x + key[:, :10]
        elif self.later == "unused":
            _ = torch.relu(key) * 2
        return nn.functional.cross_entropy(x, labels)


@pytest.mark.parametrize(("later", "marked"), [("nothing", []), ("unused", []), ("view", ["key"])])
def test_a_checkpoint_counts_if_a_used_operation_reads_it(later, marked):
    graph = graph_of_model(Present(later), quiet_options(), ARGS, training=True).graph
    assert [o.name for o in graph.operations if o.is_checkpoint] == marked
    # The operation that marks a checkpoint is not in the graph.
    assert not [o.name for o in graph.operations if "heckpoint" in o.name]


def test_frozen_weights_are_not_trained_and_need_no_activations():
    model = WithLoss(Mlp())
    model.model.layers[0].requires_grad_(False)
    graph = graph_of_model(model, quiet_options(), ARGS, training=True).graph
    first, relu, second, *_ = graph.operations
    assert (first.saved, relu.saved) == ((), ())
    assert second.saved == (relu.output.name,)
    assert [w.is_trained for w in graph.weights] == [False, False, True, True, True, True]
    # A frozen layer only computes the gradient of its input, which needs weights but no kept
    # tensors.
    model.model.layers[0].requires_grad_(True)
    model.model.layers[2].requires_grad_(False)
    graph = graph_of_model(model, quiet_options(), ARGS, training=True).graph
    assert graph.operations[2].saved == ()


def test_tied_weights_are_one_weight():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    graph = graph_of_model(Bert(layers=1), quiet_options(), (ids, ids), training=True).graph
    readers = [o.kind for o in graph.operations if "embedding.weight" in o.weights]
    assert readers == ["lookup", "product"]
    assert sum(weight.name == "embedding.weight" for weight in graph.weights) == 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_half_precision_model_has_a_half_precision_graph(layers):
    model = WithLoss(Mlp((20, *[30] * layers, 10))).half()
    graph = graph_of_model(model, quiet_options(), (ARGS[0].half(), ARGS[1]), training=True).graph
    single = WithLoss(Mlp((20, *[30] * layers, 10)))
    expected = graph_of_model(single, quiet_options(), ARGS, training=True).graph
    assert graph == expected.cast(data="float16", weights="float16")


def test_a_model_without_operations_still_has_a_stage():
    found = graph_of_model(nn.Identity(), quiet_options(), (torch.rand(4, 2),), training=False)
    assert found.placement.num_ipus == 1
    assert [operation.kind for operation in found.graph.operations] == ["view"]


class Summing(nn.Module):
    """A matrix product and the addition of its bias, and then element-wise operations."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(20, 10)), nn.Parameter(torch.ones(10))

    def forward(self, x, labels):
        x = torch.relu(x @ self.weight + self.bias)
        return nn.functional.cross_entropy(x.exp(), labels)


def test_a_bias_belongs_to_its_product():
    product, *_ = graph_of_model(Summing(), quiet_options(), ARGS, training=True).graph.operations
    assert (product.kind, product.weights) == ("product", ("weight", "bias"))


def test_tensors_that_a_backward_pass_reads_are_not_overwritten():
    graph = graph_of_model(Summing(), quiet_options(), ARGS, training=True).graph
    by_name = {operation.name: operation for operation in graph.operations}
    assert by_name["relu"].is_in_place
    assert not by_name["exp"].is_in_place


def test_the_gradient_of_a_bias_reads_nothing():
    model = Summing()
    model.weight.requires_grad_(False)
    product, *_ = graph_of_model(model, quiet_options(), ARGS, training=True).graph.operations
    assert product.saved == ()


def test_steps_of_one_name_are_numbered():
    length = 12
    steps = [
        Step(operator="tanh", module="", kind="elementwise", inputs=(n,), output=n + 1)
        for n in range(length)
    ]
    values = {n: Value(2, "float32", is_batched=True) for n in range(length + 1)}
    forward = Forward(
        inputs=(("x", 0),),
        values=values,
        weights={},
        steps=tuple(steps),
        outputs=(length,),
        batch=2,
    )
    found = graph_of_steps(forward)
    names = [operation.name for operation in found.graph.operations]
    assert names == ["tanh", *(f"tanh.{number}" for number in range(1, length))]
