"""Advice: the reason why a run does not fit, and the memory that each change saves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.cpu_time import limited_cpu_time

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import ADAM, HALF_ADAM, Location, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.what_if import advice, explain
from popdist_py.ipu.what_if.changes import changes
from tools.device.ipu_graphs import mlp, resnet
from tools.device.ipu_published import PUBLISHED

FLOAT = resnet([3, 4, 23, 3], 64, 64)
LADDER = Run(
    FLOAT, Placement.cut(FLOAT, ["layer3.8"]), Settings(accumulation=3, optimizer=ADAM), MK2
)


@pytest.fixture(scope="module")
def why():
    return explain(LADDER)


def test_why_the_ladder_begins_out_of_memory(golden, why):
    golden("out_of_memory.txt", f"{why}\n")
    assert why.memory.needed > why.memory.capacity == MK2.memory
    costs = [max(0, a.slower) / a.saved for a in why.advice if a.kind != "identical parts"]
    assert costs == pytest.approx(sorted(costs), abs=1e-11)
    # Sharing weights makes another model.
    assert why.advice[-1].kind == "identical parts"
    # Half precision comes first, as in the tutorial, and is enough.
    assert why.advice[0].change == "half precision: all but second moments in float16"
    assert why.advice[0].fits


def test_saved_bytes_are_the_difference_from_the_changed_run(why):
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


def test_profiling_is_named_if_it_is_on(why):
    assert "profiling" not in [advice.kind for advice in why.advice]
    settings = replace(LADDER.settings, is_profiled=True)
    profiled = explain(replace(LADDER, settings=settings))
    (found,) = [advice for advice in profiled.advice if advice.kind == "profiling"]
    assert found.saved == profiled.memory.needed - why.memory.needed > 0
    assert profiled.memory.by_category()["profiling"] == found.saved


def test_identical_parts_are_named_if_there_are_any(why):
    found = why.advice[-1]
    assert found.change == "identical parts reused: layer3.8 called 15 times, and so on"
    # Sharing saves the weights, accumulators and states of 14 blocks of 1,121,280 elements, and
    # those of other groups.
    assert found.saved > 14 * 1_117_184 * 4 * 4
    graph = mlp([30_000, 30_000, 10], 1)  # no two layers have equal sizes
    lack = explain(Run(graph, Placement.cut(graph), Settings(), MK2))
    assert "identical parts" not in [advice.kind for advice in lack.advice]


def test_no_explanation_if_the_model_fits():
    assert explain(replace(LADDER, graph=FLOAT.cast(data="float16", weights="float16"))) is None


def test_advice_for_too_few_io_tiles():
    graph = mlp([100_000, 10], batch=256)
    settings = Settings(io_tiles=32, overlaps_io=True)
    found = explain(Run(graph, Placement.cut(graph), settings, MK2))
    assert "bytes used on the fullest I/O tile" in str(found)
    assert "64 I/O tiles, not 32" in [advice.change for advice in found.advice]
    settings = Settings(io_tiles=96, overlaps_io=True)
    found = explain(Run(graph, Placement.cut(graph), settings, MK2))
    assert "192 I/O tiles, not 96, then the model fits" in str(found)


def test_more_io_tiles_are_no_advice_if_the_other_tiles_are_full():
    """On fewer tiles, code needs fewer bytes in total, but each tile gets fuller."""
    graph = mlp([30_000, 30_000, 10], 1)
    settings = Settings(io_tiles=64, overlaps_io=True)
    run = Run(graph, Placement.cut(graph), settings, MK2)
    more = replace(run, settings=replace(settings, io_tiles=128))
    assert more.fullest.needed < run.fullest.needed
    assert more.fullest.share > run.fullest.share
    assert "I/O tiles" not in [advice.kind for advice in explain(run).advice]


def test_a_run_that_no_change_makes_fit():
    graph = mlp([30_000, 30_000, 10], 1)
    found = explain(Run(graph, Placement.cut(graph), Settings(), MK2))
    assert "Out of memory on IPU 0" in str(found)
    assert not any(advice.fits for advice in found.advice)


def test_time_of_a_change_is_that_of_the_changed_run(why):
    away = replace(LADDER.settings, optimizer_location=Location(on_chip=False))
    (found,) = [advice for advice in why.advice if advice.kind == "optimizer off chip"]
    assert found.slower == pytest.approx(1 - LADDER.cycles / replace(LADDER, settings=away).cycles)
    assert found.time == f"{found.slower:.1%} slower"


@pytest.mark.parametrize(
    "tiles",
    [1400, *(pytest.param(tiles, marks=pytest.mark.sweep) for tiles in (1000, 900, 800)), 700],
)
def test_changes_that_make_it_fit_together(tiles):
    """Each of the changes is needed to make the model fit."""
    run = replace(LADDER, ipu=replace(MK2, tiles=tiles))
    found = explain(run)
    steps = found.together
    assert steps
    assert [step.fits for step in steps] == [False] * (len(steps) - 1) + [True]
    total = sum(step.saved for step in steps)
    assert total == found.memory.needed - after(run, steps).fullest.needed
    assert after(run, steps).fits
    for step in steps:
        assert not after(run, [other for other in steps if other != step]).fits


def after(run, steps):
    batch = advice._smaller_batch(run, run.fullest)
    for step in steps:
        run = next((other for kind, _, other in changes(run, batch) if kind == step.kind), run)
    return run


@pytest.mark.parametrize(
    ("batch", "smaller"), [(100_000, 50_000), (200_000, 50_000), (10**9, 61_035)]
)
def test_a_batch_that_is_far_too_large_is_halved_until_it_may_fit(batch, smaller):
    graph = mlp([784, 256, 10], batch)
    run = Run(graph, Placement.cut(graph), Settings(optimizer=ADAM), MK2)
    (found,) = [each for each in explain(run).advice if each.kind == "batch"]
    assert found.change == f"micro-batches of {smaller:,}, not {batch:,}"
    assert found.fits


def test_more_ipus_are_named_with_their_first_operations(why):
    places = "IPU 1 from \\S+, IPU 2 from \\S+, IPU 3 from \\S+"
    # Three micro-batches are too few for a pipeline over four IPUs.
    assert re.fullmatch(f"4 IPUs with accumulation of 7: {places}", why.more_ipus)
    names = re.findall(r"from ([^, ]+)", why.more_ipus)
    settings = replace(LADDER.settings, accumulation=7)
    divided = replace(LADDER, placement=Placement.cut(FLOAT, names), settings=settings)
    assert divided.fits
    enough = explain(replace(LADDER, settings=settings))
    assert re.fullmatch(f"4 IPUs: {places}", enough.more_ipus)


@pytest.mark.sweep
def test_advice_of_a_large_transformer_takes_two_seconds():
    (published,) = [e for e in PUBLISHED if e.name.endswith("states in float on the chip")]
    with limited_cpu_time(4):  # it takes 1.5 s without other load
        explain(published.run)


def deep(layers, width):
    graph = mlp([width] * (layers + 1), 16)
    count = len(graph.operations)
    placement = Placement(tuple(i * 8 // count for i in range(count)), tuple(range(8)))
    return Run(graph, placement, Settings(accumulation=64, optimizer=ADAM), MK2)


@pytest.mark.sweep
def test_advice_of_a_model_with_thousands_of_operations_takes_seconds():
    with limited_cpu_time(5):  # it takes 3 s without other load
        found = explain(deep(1000, 1024))
    assert found.is_complete
    assert found.more_ipus.startswith("32 IPUs")
    assert "Not all changes" not in str(found)


def test_advice_says_that_not_everything_was_compared(monkeypatch):
    run = deep(40, 4096)
    complete = explain(run)
    monkeypatch.setattr(advice, "_MOST_ESTIMATES", 0)
    fewer = explain(run)
    assert len(fewer.advice) < len(complete.advice)
    assert not fewer.is_complete
    assert str(fewer).endswith(f"\n{advice.INCOMPLETE}")
    monkeypatch.undo()
    monkeypatch.setattr(advice, "_EFFORT", 0)
    fewer = explain(run)
    assert not fewer.is_complete
    assert not fewer.more_ipus
    assert complete.is_complete
    assert complete.more_ipus
