"""Graphs of models: equal to graphs made by hand, and made without side effects on the model."""

from __future__ import annotations

import gc
import logging

import psutil
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch.on_ipu.forward_models import MODELS, Bert, Cnn, Layer, Mlp, WithLoss, images
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model
from popdist_py.poptorch.tracing.recorded_operations import Observer
from tools.device import ipu_graphs


def made(model, args, options=None, *, training=True):
    return graph_of_model(model, options or quiet_options(), args, training=training)


def compiled(model, args, options=None, *, training=True):
    options = options or quiet_options()
    if training:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        wrapper = poptorch.trainingModel(model, options, optimizer)
    else:
        wrapper = poptorch.inferenceModel(model, options)
    wrapper.compile(*args)
    result = wrapper._executable.model_graph
    wrapper.destroy()
    return result


def sizes(graph: Graph):
    """Return the sizes that are equal in two graphs of one model with different names."""
    return {
        "inputs": [(t.elements, t.type, t.is_batched) for t in graph.inputs],
        "weights": sorted((w.elements, w.type, w.is_trained) for w in graph.weights),
        "products": [o.product for o in graph.operations if o.product],
        "outputs": [
            (t.elements, t.type, t.is_batched) for t in map(graph.tensors.get, graph.outputs)
        ],
    }


def needed(graph: Graph, **options):
    placement = Placement.cut(graph)
    return memory(graph, placement, Settings(**options), MK2).ipus[0].needed


class Layers(nn.Module):
    """Encoder layers whose input is the activations of the first layer."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))

    def forward(self, input, labels):
        return nn.functional.cross_entropy(self.layers(input).flatten(0, 1), labels.flatten())


BY_HAND = {
    "mlp": (
        lambda: WithLoss(Mlp((20, 50, 50, 10))),
        (torch.rand(6, 20), torch.zeros(6, dtype=torch.int64)),
        ipu_graphs.mlp((20, 50, 50, 10), 6),
    ),
    "cnn": (lambda: WithLoss(Cnn()), images(16), ipu_graphs.cnn(4)),
    "resnet50": (
        lambda: WithLoss(torchvision.models.resnet50()),
        images(224),
        ipu_graphs.resnet([3, 4, 6, 3], 224, 4),
    ),
    "resnet101": (
        lambda: WithLoss(torchvision.models.resnet101()),
        images(224),
        ipu_graphs.resnet([3, 4, 23, 3], 224, 4),
    ),
    "bert": (
        lambda: Bert(layers=3, width=128, words=500, heads=2),
        (torch.zeros(4, 32, dtype=torch.int64),) * 2,
        ipu_graphs.transformer(3, 128, 32, 4, heads=2, words=500, type="float32"),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.sweep) if "resnet" in n else n for n in BY_HAND],
)
def test_equals_the_graph_made_by_hand(name):
    make, args, expected = BY_HAND[name]
    graph = made(make(), args).graph
    found, wanted = sizes(graph), sizes(expected)
    found["inputs"].sort()
    wanted["inputs"].sort()
    assert found == wanted
    for options in ({}, {"recompute": "norm"}, {"recompute": "stage"}, {"is_training": False}):
        assert needed(graph, **options) == pytest.approx(needed(expected, **options), rel=0.03)


LARGE = ("resnet", "mobilenet", "efficientnet")
# In inference, only these models differ from training: those with norms, dropout or recurrent
# states.
BOTH = [
    pytest.param(name, True, marks=[pytest.mark.sweep] * (name in LARGE)) for name in MODELS
] + [pytest.param(name, False, marks=pytest.mark.sweep) for name in ("cnn", "encoder", "lstm")]


@pytest.mark.parametrize(("name", "training"), BOTH)
def test_shapes_and_compilation_give_the_same_graph(name, training):
    model, args = MODELS[name]()
    model.train(training)
    before = made(model, args, training=training)
    assert compiled(model, args, training=training) == before
    assert any(operation.product for operation in before.graph.operations)


def tensors_in(model):
    """Yield every tensor in the attributes, lists and buffers of a model's modules."""
    for module in model.modules():
        for value in [*vars(module).values(), *module._parameters.values()]:
            values = value.values() if isinstance(value, dict) else value
            items = values if isinstance(value, dict | list | tuple) else [value]
            yield from (item for item in items if isinstance(item, torch.Tensor))


class Remembering(nn.Module):
    """A model that stores results in an attribute, a list and a buffer, and seeds torch."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.seen, self.last, self.constant = [], None, torch.ones(4)

    def forward(self, x):
        torch.manual_seed(0)
        self.last = self.norm(self.layer(x * self.constant))
        self.seen.append(self.last)
        return self.last


def test_a_graph_without_data_does_not_change_the_model():
    model = Remembering().train()
    before = [(id(tensor), tensor.clone()) for tensor in tensors_in(model)]
    args = (torch.rand(8, 4),)
    random = torch.get_rng_state()
    made(model, args, training=False)
    after = list(tensors_in(model))
    assert [id(tensor) for tensor in after] == [place for place, _ in before]
    assert all(torch.equal(a, b) for a, (_, b) in zip(after, before, strict=True))
    assert (model.seen, model.last) == ([], None)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_compiled_model_has_a_graph_and_still_runs():
    model, args = MODELS["cnn"]()
    wrapper = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    _, first = wrapper(*args)
    assert made(model, args) == wrapper._executable.model_graph
    _, second = wrapper(*args)
    assert second != first
    wrapper.destroy()


def test_a_stored_executable_contains_its_graph(tmp_path):
    model, args = MODELS["mlp"]()
    wrapper = poptorch.inferenceModel(model, quiet_options())
    wrapper.compile(*args)
    file = tmp_path / "model.poptorch"
    wrapper.save(str(file))
    loaded = poptorch.load(str(file))
    loaded.compile(*args)
    assert loaded._executable.model_graph == wrapper._executable.model_graph is not None


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x):
        return self.layer(x) if self.count.item() else x


def test_a_forward_that_reads_values_has_to_be_compiled():
    args = (torch.rand(8, 4),)
    with pytest.raises(poptorch.Error, match=r"but no values .* call compile\(\)"):
        made(Reading(), args, training=False)
    assert compiled(Reading(), args, training=False).graph.operations[0].kind == "product"


def test_wrong_arguments_have_one_error(caplog, monkeypatch):
    wrong = torch.rand(4, 5)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(poptorch.Error, match=r"have shapes but no values .*must have same"):
        made(nn.Linear(3, 2), (wrong,), training=False)
    # torch logs a traceback of its own for this error.
    assert caplog.records == []
    assert not log.disabled


def test_observing_does_not_change_results(monkeypatch):
    results = []
    for wanted in (True, False):
        monkeypatch.setattr(type(poptorch.Options().Emulator), "asks_model", wanted)
        torch.manual_seed(5)
        model, args = MODELS["encoder"]()
        options = quiet_options().randomSeed(3)
        wrapper = poptorch.trainingModel(
            model, options, poptorch.optim.SGD(model.parameters(), lr=0.1)
        )
        outputs = [wrapper(*args)[1] for _ in range(3)]
        results.append((outputs, torch.rand(1), wrapper._executable.model_graph is not None))
        wrapper.destroy()
    assert results[0][:2] == results[1][:2]
    assert [captures for *_, captures in results] == [True, False]


@pytest.mark.parametrize("place", ["_operation", "_begin", "_end", "observed"])
def test_an_error_while_observing_does_not_stop_a_compilation(monkeypatch, place):
    def fail(*_):
        raise RuntimeError("observing failed")

    monkeypatch.setattr(Observer, place, fail)
    model, args = MODELS["mlp"]()
    assert compiled(model, args) is None


@pytest.mark.parametrize(
    ("make", "args"),
    [
        pytest.param(
            lambda: WithLoss(torchvision.models.resnet50()),
            images(224, batch=32),
            marks=pytest.mark.sweep,
        ),
        (
            lambda: Bert(layers=2, width=768, words=30522, heads=12),
            (torch.zeros(32, 384, dtype=torch.int64),) * 2,
        ),
    ],
    ids=["resnet50", "bert"],
)
def test_large_models_take_no_memory(make, args):
    with torch.device("meta"):
        model = make()
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    graph = made(model, args).graph
    assert process.memory_info().rss - before < 50 * 2**20
    weights = sum(weight.bytes for weight in graph.weights)
    assert weights > 80 * 2**20


@given(batch=st.integers(2, 9), factor=st.integers(1, 3))
@settings(max_examples=4)
def test_sizes_of_a_sample_do_not_depend_on_the_batch(batch, factor):
    model, _ = MODELS["cnn"]()
    one, many = (made(model, images(16, batch=size)).graph for size in (batch, factor * batch))
    assert one.with_batch(factor * batch) == many


def test_the_call_is_cut_into_micro_batches():
    options = quiet_options().replicationFactor(2).deviceIterations(3)
    options.Training.gradientAccumulation(2)
    model, _ = MODELS["mlp"]()
    args = (torch.rand(60, 20), torch.zeros(60, dtype=torch.int64))
    graph = made(model, args, options).graph
    assert graph.batch == 5
    assert graph == made(model, (args[0][:5], args[1][:5])).graph
