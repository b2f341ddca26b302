"""Captured models: equal to those made by hand, whatever they are made of, and nothing is left."""

from __future__ import annotations

import pytest
import torch
import torchvision
from support import ipu_graphs
from support.forward_models import MODELS, Bert, Cnn, Layer, Mlp, WithLoss, images
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.poptorch.on_ipu.capture import capture


def captured(model, args, options=None, *, training=True):
    return capture(model, options or quiet_options(), args, training=training)


def compiled(model, args, options=None, *, training=True):
    options = options or quiet_options()
    if training:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        wrapper = poptorch.trainingModel(model, options, optimizer)
    else:
        wrapper = poptorch.inferenceModel(model, options)
    wrapper.compile(*args)
    result = wrapper._executable.captured
    wrapper.destroy()
    return result


def sizes(graph: Graph):
    """What two graphs of one model have in common, whatever their names."""
    return {
        "inputs": [(t.elements, t.type, t.is_batched) for t in graph.inputs],
        "weights": sorted((w.elements, w.type, w.is_trained) for w in graph.weights),
        "products": [o.product for o in graph.operations if o.product],
        "outputs": [
            (t.elements, t.type, t.is_batched) for t in map(graph.tensors.get, graph.outputs)
        ],
    }


def needed(graph: Graph, **settings):
    placement = Placement.cut(graph)
    return memory(graph, placement, Settings(**settings), MK2).ipus[0].needed


class Layers(nn.Module):
    """Encoder layers on given activations."""

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


@pytest.mark.parametrize("name", BY_HAND)
def test_equals_the_graph_made_by_hand(name):
    make, args, expected = BY_HAND[name]
    graph = captured(make(), args).graph
    found, wanted = sizes(graph), sizes(expected)
    found["inputs"].sort()
    wanted["inputs"].sort()
    assert found == wanted
    for settings in ({}, {"recompute": "norm"}, {"recompute": "stage"}, {"is_training": False}):
        assert needed(graph, **settings) == pytest.approx(needed(expected, **settings), rel=0.03)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_without_data_and_compiling_capture_the_same(name, training):
    model, args = MODELS[name]()
    model.train(training)
    before = captured(model, args, training=training)
    assert compiled(model, args, training=training) == before
    assert any(operation.product for operation in before.graph.operations)
