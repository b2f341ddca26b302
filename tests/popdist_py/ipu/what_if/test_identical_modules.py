"""Identical submodules of a model, and the graph in which they share weights."""

from __future__ import annotations

from dataclasses import replace

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.what_if.identical_modules import reused
from tools.device.ipu_graphs import mlp, resnet


def weights_of(graph):
    return {weight.name for weight in graph.weights}


def test_equal_layers_share_their_weights():
    graph = mlp([10, 20, 20, 20, 5], 2)
    found = reused(graph, Placement.cut(graph))
    assert (found.kept, found.calls) == ("layers.1", 2)
    gone = weights_of(graph) - weights_of(found.graph)
    assert gone == {"layers.2.weight", "layers.2.bias"}
    read = [one.weights for one in found.graph.operations if one.weights]
    assert read[1] == read[2] == ("layers.1.weight", "layers.1.bias")
    assert [one.name for one in found.graph.operations] == [one.name for one in graph.operations]


def test_modules_of_different_size_or_type_are_not_identical():
    graph = mlp([10, 20, 30, 5], 2)
    assert reused(graph, Placement.cut(graph)) is None
    equal = mlp([10, 20, 20, 20, 5], 2)
    other = tuple(
        replace(one, is_trained=False) if one.name == "layers.2.weight" else one
        for one in equal.weights
    )
    assert reused(replace(equal, weights=other), Placement.cut(equal)) is None


def test_parts_of_different_stages_stay_apart():
    graph = mlp([10, 20, 20, 20, 5], 2)
    assert reused(graph, Placement.cut(graph, ["layers.2"])) is None


def test_the_largest_group_is_named():
    graph = resnet([3, 4, 6, 3], 64, 4)
    found = reused(graph, Placement.cut(graph))
    # The first block of each layer has another size.
    assert (found.kept, found.calls) == ("layer3.1", 5)
    assert {"layer3.1.conv1.weight", "layer3.0.conv1.weight"} <= weights_of(found.graph)
    assert "layer3.5.conv1.weight" not in weights_of(found.graph)
