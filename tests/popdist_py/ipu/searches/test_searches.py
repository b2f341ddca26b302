"""Searches: compared with the model itself, and with trying everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.searches import (
    Run,
    best_splits,
    cheapest_recomputation,
    largest_batch,
    least_slowest,
    places_to_cut,
    splits,
    with_checkpoints,
)
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.stage_cycles import stage_cycles
from tools.device.ipu_graphs import Builder, mlp, resnet, transformer

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


@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 64),
    stages=st.integers(1, 3),
    tiles=st.sampled_from([4, 8, 16, 1472]),
    strategy=st.sampled_from(["grouped", "interleaved", "sharded"]),
)
def test_no_split_is_missed_between_any_operations(batch, stages, tiles, strategy):
    """Where several tensors cross too: a later start may need more, as more comes in."""
    graph = transformer(1, 64, 16, batch)
    options = Settings(accumulation=5, optimizer=ADAM, strategy=strategy)
    run = Run(graph, Placement.cut(graph), options, replace(MK2, tiles=tiles))
    count = len(graph.operations)
    tried = []
    for cuts in combinations(range(1, count), stages - 1):
        places = [0, *cuts, count]
        numbers = [s for s in range(stages) for _ in range(places[s + 1] - places[s])]
        placement = Placement(tuple(numbers), tuple(range(stages)))
        if memory(graph, placement, options, run.ipu).fits:
            tried.append(slowest(run, placement))
    found = best_splits(run, stages, range(1, count))
    assert (found is None) == (not tried)
    if found is not None:
        assert memory(graph, found, options, run.ipu).fits
        assert slowest(run, found) == pytest.approx(min(tried))


@given(
    costs=st.lists(st.integers(1, 9), min_size=6, max_size=8),
    stages=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_cuts_are_the_best_of_all_whatever_fits(costs, stages, random):
    """Stages that fit and that do not in no order at all, so that what is best at first is not."""
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


def test_a_longer_stage_may_need_less():
    """So that places are tried one by one: in front of a large tensor less has to be kept."""
    build = Builder(64, "float16")
    x = build.input("input", 64)
    x = build.linear("narrow", x, 1, (64, 64))
    x = build.linear("widen", x, 1, (64, 40_000))
    x = build.linear("narrow again", x, 1, (40_000, 64))
    x = build.linear("tail", x, 1, (64, 64))
    graph = build.graph([build.add("loss", "loss", [x], 1)])
    options = Settings(accumulation=9, recompute="stage")

    def middle(begin):
        run = Run(graph, Placement.cut(graph, [begin, "tail"]), options, MK2)
        report = memory(graph, run.placement, options, MK2)
        return report.ipus[1].by_category()["stash"]

    assert middle("widen") < middle("narrow again")


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


def test_many_places_are_not_all_tried(monkeypatch):
    """A report of what does not fit asks for splits: it may not take minutes."""
    graph = with_checkpoints(mlp([64] * 101, batch=256), range(1, 200, 50))
    options = Settings(accumulation=16, optimizer=ADAM)
    tiny = replace(MK2, tiles=6)
    run = Run(graph, Placement.cut(graph), options, tiny)
    asked = []
    real = splits.ipu_fits
    monkeypatch.setattr(splits, "ipu_fits", lambda *a: asked.append(a[4]) or real(*a))
    assert len(places_to_cut(graph)) > 3 * 64
    found = best_splits(run, 8)
    assert memory(graph, found, options, tiny).fits
    assert 0 < len(asked) < 1000  # of all places it is 5,000
    count = len(graph.operations)
    even = Placement(tuple(i * 8 // count for i in range(count)), tuple(range(8)))
    assert slowest(run, found) < 1.1 * slowest(run, even)


def test_all_places_are_tried_where_some_do_not_fit(monkeypatch):
    monkeypatch.setattr(splits, "_MANY_PLACES", 1)
    graph = mlp([64, 2048, 2048, 2048, 64, 64, 64, 64], batch=8)
    options = Settings(accumulation=5, optimizer=ADAM)
    for tiles in range(100, 400, 10):
        run = Run(graph, Placement.cut(graph), options, replace(MK2, tiles=tiles))
        quick, found = best_splits(run, 2, tries_all=False), best_splits(run, 2)
        assert found is not None or quick is None
        if found is not None and quick is None:
            return
    raise AssertionError("no device on which it matters")
