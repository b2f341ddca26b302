"""The curve of memory against time, compared with all sets of checkpoints of small graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_graphs import graphs

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import Run, cheapest_recomputation, recomputation_curve
from popdist_py.ipu.settings import ADAM, MOMENTUM, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import resnet
from tools.device.ipu_published import PUBLISHED


def throughput(run):
    return cycles(run.graph, run.placement, run.settings, run.ipu).throughput


def tried(run):
    """Yield the run with each kind of recomputation and every set of checkpoints."""
    for kind in ("none", "norm", "standard", "stage"):
        yield replace(run, settings=replace(run.settings, recompute=kind))
    operations, last = run.graph.operations, run.placement.num_stages - 1
    numbers = range(len(operations))
    for chosen in chain.from_iterable(
        combinations(numbers, n) for n in range(1, len(operations) + 1)
    ):
        marked = tuple(
            replace(o, is_checkpoint=True) if i in chosen else o for i, o in enumerate(operations)
        )
        again = any(marked[i].is_checkpoint and run.placement.stages[i] == last for i in numbers)
        settings = replace(run.settings, recompute="stage", recomputes_last=again)
        yield replace(run, graph=replace(run.graph, operations=marked), settings=settings)


@settings(max_examples=25, deadline=None)
@given(
    graph=graphs(most=6, shares_weights=False), data=st.data(), tiles=st.sampled_from([64, 1472])
)
def test_no_set_of_checkpoints_is_better_than_the_curve(graph, data, tiles):
    count = len(graph.operations)
    cut = data.draw(st.integers(0, count - 1))
    stages = (0,) * (count - cut) + (1,) * cut
    placement = Placement(stages, (0, 1) if cut else (0,))
    run = Run(graph, placement, Settings(accumulation=5, optimizer=ADAM), replace(MK2, tiles=tiles))
    curve = recomputation_curve(run)
    for other in tried(run):
        share, speed = other.fullest.share, throughput(other)
        assert any(p.share <= share and p.samples_per_second >= speed for p in curve)
    for point in curve:
        assert point.share == point.run.fullest.share
        assert point.samples_per_second == throughput(point.run)


@pytest.mark.sweep
def test_sets_are_better_than_regular_distances():
    graph = resnet([1, 2, 2, 1], 224, 32, "float16")
    settings = Settings(accumulation=6, optimizer=MOMENTUM, partials="float16")
    run = Run(graph, Placement.cut(graph), settings, MK2)
    curve = recomputation_curve(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("popdist_py.ipu.searches.checkpoint_sets._worth_keeping", lambda _: [])
        regular = recomputation_curve(run)
    assert len(curve) > len(regular)
    assert any(
        all(point.samples_per_second > p.samples_per_second for p in regular if p.share <= at)
        for point in curve
        if (at := point.share) < curve[0].share
    )
    # Sets that differ by one group of operations from the best sets are better still.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("popdist_py.ipu.searches.checkpoint_sets._CHANGED_SETS", 0)
        unchanged = recomputation_curve(run)
    assert all(
        any(p.share <= one.share and p.samples_per_second >= one.samples_per_second for p in curve)
        for one in unchanged
    )
    assert len(curve) > len(unchanged)
    # The chosen run is the fastest one of the curve that fits.
    chosen = cheapest_recomputation(run)
    assert chosen.fits
    assert chosen.cycles == min(point.run.cycles for point in curve if point.verdict == "fits")


@pytest.mark.sweep
def test_curve_of_a_pipeline_falls():
    (published,) = [each for each in PUBLISHED if each.name == "ViT-base, batch 8, two IPUs"]
    curve = recomputation_curve(published.run)
    assert len(curve) > 5
    pairs = [(point.samples_per_second, point.share) for point in curve]
    assert pairs == sorted(pairs, reverse=True)
    assert all(point.kept for point in curve)
