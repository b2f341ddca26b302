"""Graphs and placements: errors for invalid ones, and sizes that follow from batch and types."""

from __future__ import annotations

import pickle

import pytest
from support.cpu_time import limited_cpu_time

from popdist_py.ipu.graph import Graph, Operation, Placement, Tensor, Weight
from tools.device.ipu_graphs import mlp


def test_sizes_follow_batch_and_types():
    graph = mlp([10, 20, 5], batch=4)
    assert graph.bytes_of("input") == 4 * 10 * 4
    assert graph.with_batch(8).bytes_of("input") == 8 * 10 * 4
    half = graph.cast(data="float16", weights="float16")
    assert half.bytes_of("input") == 4 * 10 * 2
    assert half.weights[0].bytes == 10 * 20 * 2
    assert half.bytes_of("labels") == graph.bytes_of("labels") == 4 * 4
    assert graph.cast(data="float16").weights == graph.weights


def test_a_memory_proportion_is_a_share():
    for value in (0, 1.5):
        with pytest.raises(ValueError, match="memory_proportion of the operation f is"):
            Operation("f", "view", ("x",), Tensor("y", 1), memory_proportion=value)


def test_views_and_in_place_operations_share_memory():
    a = Tensor("a", 4)
    graph = Graph(
        inputs=(a,),
        weights=(),
        operations=(
            Operation("view", "view", ("a",), Tensor("b", 4)),
            Operation("relu", "elementwise", ("b",), Tensor("c", 4), is_in_place=True),
            Operation("tanh", "elementwise", ("c",), Tensor("d", 4)),
        ),
        outputs=("d",),
        batch=1,
    )
    assert dict(graph.root_of) == {"a": "a", "b": "a", "c": "a", "d": "d"}
    assert graph.needs_gradient == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "number of samples of a micro-batch"),
        ({"inputs": (Tensor("x", 1), Tensor("x", 1))}, "same name"),
        ({"operations": (Operation("f", "view", ("y",), Tensor("z", 1)),)}, "f reads y"),
        (
            {"operations": (Operation("f", "view", ("x",), Tensor("x", 1)),)},
            "two tensors of the graph have the name x",
        ),
        ({"outputs": ("y",)}, "output y"),
    ],
)
def test_invalid_graphs(changes, message):
    given = {
        "inputs": (Tensor("x", 1),),
        "weights": (Weight("w", 1),),
        "operations": (),
        "outputs": ("x",),
        "batch": 1,
    } | changes
    with pytest.raises(ValueError, match=message):
        Graph(**given)


def test_placement_by_modules():
    graph = mlp([4, 4, 4, 4], batch=1)
    placement = Placement.cut(graph, ["layers.1", "layers.2"])
    assert placement.ipus == (0, 1, 2)
    assert [o.name for o in placement.operations_of(graph, 1)] == ["layers.1", "layers.1.relu"]
    with pytest.raises(ValueError, match=r"no stage can begin with the submodule layers\.0"):
        Placement.cut(graph, ["layers.1", "layers.0"])
    with pytest.raises(ValueError, match="numbers that never decrease"):
        Placement((0, 1, 0), (0, 1))
    with pytest.raises(ValueError, match="2 IPUs given"):
        Placement((0, 0), (0, 1))


def test_a_graph_can_be_pickled_after_use():
    graph = mlp([4, 5, 6], batch=2)
    assert graph.root_of
    assert pickle.loads(pickle.dumps(graph)) == graph


def test_many_operations_are_checked_in_a_moment():
    graph = mlp([8] * 10_001, 4)
    with limited_cpu_time(1):
        assert len(graph.with_batch(5).operations) == 20_000
