"""Advice and searches: compared with the model itself, and with trying everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ipu_graphs import mlp, resnet, transformer

from popdist_py.ipu.cycles import stage_cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.what_if import (
    Run,
    best_splits,
    cheapest_recomputation,
    explain,
    largest_batch,
    places_to_cut,
    with_checkpoints,
)

FLOAT = resnet([3, 4, 23, 3], 64, 64)
LADDER = Run(
    FLOAT, Placement.cut(FLOAT, ["layer3.8"]), Settings(accumulation=3, optimizer=ADAM), MK2
)
RESNET_50 = resnet([3, 4, 6, 3], 224, 20, "float16")
ONE_IPU = Run(
    RESNET_50, Placement.cut(RESNET_50), Settings(accumulation=6, optimizer=MOMENTUM), MK2
)


@pytest.fixture(scope="module")
def why():
    return explain(LADDER)


def test_why_the_ladder_begins_out_of_memory(golden, why):
    golden("out_of_memory.txt", f"{why}\n")
    assert why.memory.needed > why.memory.capacity == MK2.memory
    assert [a.saved for a in why.advice] == sorted((a.saved for a in why.advice), reverse=True)
    # Half precision comes first, as in the tutorial, and is enough.
    assert why.advice[0].change == "half precision: all but second moments in float16"
    assert why.advice[0].fits


def test_saved_bytes_are_what_the_changed_run_lacks(why):
    half = replace(
        LADDER,
        graph=FLOAT.cast(data="float16", weights="float16"),
        settings=replace(LADDER.settings, optimizer=HALF_ADAM),
    )
    saved = {advice.change: advice.saved for advice in why.advice}
    assert (
        saved["half precision: all but second moments in float16"]
        == why.memory.needed - half.fullest.needed
    )
    fewer = replace(LADDER, graph=FLOAT.with_batch(32))
    assert saved["micro-batches of 32, not 64"] == why.memory.needed - fewer.fullest.needed


def test_nothing_to_explain_where_it_fits():
    assert explain(replace(LADDER, graph=FLOAT.cast(data="float16", weights="float16"))) is None


def test_more_than_anything_helps():
    graph = mlp([30_000, 30_000, 10], 1)
    found = explain(Run(graph, Placement.cut(graph), Settings(), MK2))
    assert "Out of memory on IPU 0" in str(found)
    assert not any(advice.fits for advice in found.advice)


@pytest.mark.parametrize("run", [LADDER, ONE_IPU, replace(ONE_IPU, settings=Settings())])
def test_largest_batch(run):
    found = largest_batch(run)
    assert replace(run, graph=run.graph.with_batch(found)).fits
    assert not replace(run, graph=run.graph.with_batch(found + 1)).fits
    assert largest_batch(run, limit=found // 2) == found // 2


def test_no_batch_is_small_enough():
    graph = mlp([30_000, 30_000, 10], 1)
    assert largest_batch(Run(graph, Placement.cut(graph), Settings(), MK2)) == 0


@settings(max_examples=15)
@given(
    widths=st.lists(st.integers(1, 3000), min_size=4, max_size=7),
    stages=st.integers(1, 3),
    tiles=st.sampled_from([8, 32, 1472]),
)
def test_best_splits_are_those_of_trying_everything(widths, stages, tiles):
    graph = mlp(widths, batch=8)
    options = Settings(accumulation=5, optimizer=ADAM)
    run = Run(graph, Placement.cut(graph), options, replace(MK2, tiles=tiles))
    count = len(graph.operations)
    tried = []
    for cuts in combinations(places_to_cut(graph), stages - 1):
        places = [0, *cuts, count]
        numbers = [s for s in range(stages) for _ in range(places[s + 1] - places[s])]
        placement = Placement(tuple(numbers), tuple(range(stages)))
        if memory(graph, placement, options, run.ipu).fits:
            tried.append(slowest(run, placement))
    found = best_splits(run, stages)
    assert (found is None) == (not tried)
    if found is not None:
        assert memory(graph, found, options, run.ipu).fits
        assert slowest(run, found) == pytest.approx(min(tried))


def slowest(run, placement):
    again = run.settings.recomputing(placement)
    stages = [
        stage_cycles(run.graph, placement, run.settings, run.ipu, stage)
        for stage in range(placement.num_stages)
    ]
    # A stage that recomputes is taken to do all of its forward again.
    return max(s.forward * (2 if i in again else 1) + s.backward for i, s in enumerate(stages))


def test_splits_of_the_ladder_are_at_least_as_good_as_those_of_the_tutorial():
    half = replace(
        LADDER,
        graph=FLOAT.cast(data="float16", weights="float16"),
        settings=Settings(accumulation=8, optimizer=HALF_ADAM),
    )
    found = best_splits(half, 2)
    assert replace(half, placement=found).cycles <= half.cycles
    assert best_splits(half, 400) is None


def test_cheapest_recomputation_that_fits():
    assert not ONE_IPU.fits
    found = cheapest_recomputation(ONE_IPU)
    assert found.fits
    assert found.settings.recompute == "stage"
    kept = [o.name for o in found.graph.operations if o.is_checkpoint]
    assert kept
    # Where everything has room nothing is done again.
    small = replace(ONE_IPU, graph=RESNET_50.with_batch(1))
    assert cheapest_recomputation(small).settings.recompute == "none"
    large = replace(ONE_IPU, graph=RESNET_50.with_batch(500))
    assert cheapest_recomputation(large) is None


def test_places_to_cut_a_transformer():
    graph = transformer(2, 64, 16, 1)
    places = places_to_cut(graph)
    names = [graph.operations[place].name for place in places]
    assert "layers.1.attention.query" in names
    # Between query and key the layer's input crosses as well as the query.
    assert "layers.1.attention.key" not in names
    marked = with_checkpoints(graph, [graph_index(graph, "layers.1.attention.query")])
    assert [o.name for o in marked.operations if o.is_checkpoint] == ["layers.0.norm"]


def graph_index(graph, name):
    return [o.name for o in graph.operations].index(name)
