"""Searches, compared with the device model and with trying all possibilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import (
    Run,
    cheapest_recomputation,
    largest_batch,
    least_slowest,
    places_to_cut,
    with_checkpoints,
)
from popdist_py.ipu.settings import ADAM, MOMENTUM, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp, resnet, transformer

FLOAT = resnet([3, 4, 23, 3], 64, 64)
LADDER = Run(
    FLOAT, Placement.cut(FLOAT, ["layer3.8"]), Settings(accumulation=3, optimizer=ADAM), MK2
)
RESNET_50 = resnet([3, 4, 6, 3], 224, 20, "float16")
ONE_IPU = Run(
    RESNET_50, Placement.cut(RESNET_50), Settings(accumulation=6, optimizer=MOMENTUM), MK2
)


@pytest.mark.parametrize("run", [LADDER, ONE_IPU, replace(ONE_IPU, settings=Settings())])
def test_largest_batch(run):
    found = largest_batch(run)
    assert replace(run, graph=run.graph.with_batch(found)).fits
    assert not replace(run, graph=run.graph.with_batch(found + 1)).fits
    assert largest_batch(run, limit=found // 2) == found // 2


def test_no_batch_is_small_enough():
    graph = mlp([30_000, 30_000, 10], 1)
    assert largest_batch(Run(graph, Placement.cut(graph), Settings(), MK2)) == 0


@given(
    costs=st.lists(st.integers(1, 9), min_size=6, max_size=8),
    stages=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_cuts_are_the_best_of_all_whatever_fits(costs, stages, random):
    """Whether a stage fits is random, so the best first stages are often not the best of all."""
    ends = range(len(costs) + 1)
    stage_fits = {
        key: random.random() < 0.7 for key in product(ends, ends, range(stages)) if key[0] < key[1]
    }

    def work(begin, end, stage):
        return float(sum(costs[begin:end]) * (stage + 1))

    tried = []
    for inner in combinations(ends[1:-1], stages - 1):
        cuts = (0, *inner, len(costs))
        if all(stage_fits[(*pair, stage)] for stage, pair in enumerate(pairwise(cuts))):
            tried.append(max(work(*pair, stage) for stage, pair in enumerate(pairwise(cuts))))
    found = least_slowest(ends, stages, work, lambda *key: stage_fits[key])
    assert (found is None) == (not tried)
    if found is not None:
        assert all(stage_fits[(*pair, stage)] for stage, pair in enumerate(pairwise(found)))
        slowest_of = [work(*pair, stage) for stage, pair in enumerate(pairwise(found))]
        assert max(slowest_of) == min(tried)


def test_cheapest_recomputation_that_fits():
    graph = resnet([1, 2, 2, 1], 224, 36, "float16")
    run = replace(ONE_IPU, graph=graph, placement=Placement.cut(graph))
    assert not run.fits
    found = cheapest_recomputation(run)
    assert found.fits
    assert found.settings.recompute == "stage"
    kept = [o.name for o in found.graph.operations if o.is_checkpoint]
    assert kept
    # If all tensors fit into memory, nothing is recomputed.
    small = replace(run, graph=graph.with_batch(1))
    assert cheapest_recomputation(small).settings.recompute == "none"
    small_graph = mlp([784, 256, 10], 10**6)
    large = replace(ONE_IPU, graph=small_graph, placement=Placement.cut(small_graph))
    assert cheapest_recomputation(large) is None


def test_places_to_cut_a_transformer():
    graph = transformer(2, 64, 16, 1)
    places = places_to_cut(graph)
    names = [graph.operations[place].name for place in places]
    assert "layers.1.attention.query" in names
    # Between query and key, two tensors cross the place: the layer's input and the query.
    assert "layers.1.attention.key" not in names
    marked = with_checkpoints(graph, [graph_index(graph, "layers.1.attention.query")])
    assert [o.name for o in marked.operations if o.is_checkpoint] == ["layers.0.norm"]


def graph_index(graph, name):
    return [o.name for o in graph.operations].index(name)
