"""The search for the fewest IPUs on which a model fits, and for the options that it needs there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from popdist_py.ipu.graph import Graph, Operation, Placement, Product, Tensor, saved_by
from popdist_py.ipu.searches import Run, fewest_ipus
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, Location, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp, resnet

GRAPH = mlp([512] * 7, batch=512)
RUN = Run(GRAPH, Placement.cut(GRAPH), Settings(accumulation=16, optimizer=ADAM), MK2)


def on(tiles: int, run: Run = RUN) -> Run:
    return replace(run, ipu=replace(MK2, tiles=tiles))


def test_one_ipu_is_enough_if_everything_fits():
    best, *others = fewest_ipus(RUN, 4)
    assert (best.ipus, best.changes, best.verdict) == (1, (), "fits")
    assert [one.ipus for one in others] == [2, 4]
    assert all(one.samples_per_second > best.samples_per_second for one in others)


@pytest.mark.parametrize("tiles", [60, 40, 32, 24, 16])
def test_the_result_fits_and_no_smaller_number_of_ipus_does(tiles):
    run = on(tiles)
    best, *others = fewest_ipus(run, 8)
    assert best.verdict == best.run.fullest.verdict == "fits"
    assert all(one.ipus >= best.ipus or one.verdict == "close" for one in others)
    alike = [one.samples_per_second for one in others if one.ipus == best.ipus]
    assert all(speed <= best.samples_per_second for speed in alike)
    # With half of the IPUs, no combination certainly fits.
    for fewer in fewest_ipus(run, best.ipus // 2):
        assert fewer.verdict == "close"


def test_changes_are_those_of_the_run():
    found = [one for tiles in (16, 24, 32, 40, 60) for one in fewest_ipus(on(tiles), 4)]
    for one in found:
        settings = one.run.settings
        texts = " ".join(one.changes)
        assert ("optimiser state off the chip" in texts) != settings.optimizer_location.on_chip
        assert ("activations off the chip" in texts) != settings.activation_location.on_chip
        assert ("checkpoints between layers" in texts) == any(
            o.is_checkpoint for o in one.run.graph.operations
        )
    assert len({one.changes for one in found}) > 3


def test_only_replicas_can_share_optimiser_state():
    run = replace(RUN, settings=replace(RUN.settings, replicas=4))
    texts = [
        text for tiles in (24, 40) for one in fewest_ipus(on(tiles, run), 2) for text in one.changes
    ]
    assert "optimiser state sharded" in texts
    assert "optimiser state sharded" not in [
        text for tiles in (24, 40) for one in fewest_ipus(on(tiles), 2)
        for text in one.changes
    ]  # fmt: skip


def test_a_pipeline_gets_the_micro_batches_that_it_needs():
    run = replace(RUN, settings=Settings(optimizer=HALF_ADAM))
    found = fewest_ipus(on(32, run), 4)
    for one in found:
        least = 2 * one.run.placement.num_stages - 1
        assert one.run.settings.accumulation >= least
        assert (f"accumulation of {one.run.settings.accumulation}" in one.changes) == (
            one.run.settings.accumulation > 1
        )


def test_recomputation_that_needs_more_memory_hides_no_combination():
    """The largest tensor is kept off the chip, but a recomputation would make it on the chip."""
    kinds = (("product", 1_200_000), ("norm", 100_000), ("elementwise", 600_000), ("pool", 2_000))
    read, operations = "in", []
    for kind, size in (*kinds, ("pool", 200_000)):
        output = Tensor(f"{kind}{len(operations)}:out", size)
        saved = saved_by(kind, (read,), output.name, has_weights=False)
        product = Product(1, 16, 4096) if kind == "product" else None
        name = output.name.removesuffix(":out")
        operations.append(Operation(name, kind, (read,), output, (), saved, product))
        read = output.name
    graph = Graph((Tensor("in", 100),), (), tuple(operations), (read,), 64)
    settings = Settings(recompute="none", synthetic_data=True)
    run = Run(graph, Placement.cut(graph), settings, replace(MK2, tile_bytes=190_000))
    away = replace(settings, activation_location=Location(on_chip=False))
    again = replace(away, recompute="stage", recomputes_last=True)
    assert replace(run, settings=away).fits
    assert replace(run, settings=again).fullest.verdict == "does not fit"
    assert ("activations off the chip",) in [one.changes for one in fewest_ipus(run, 1)]


def test_nothing_fits():
    graph = mlp([30_000, 30_000, 10], 1)
    assert fewest_ipus(Run(graph, Placement.cut(graph), Settings(), MK2)) == ()


def test_one_ipu_recomputes_if_that_is_faster_than_memory_off_the_chip():
    graph = resnet([1, 2, 2, 1], 224, 32, "float16")
    settings = Settings(accumulation=6, optimizer=MOMENTUM, partials="float16")
    run = Run(graph, Placement.cut(graph), settings, MK2)
    assert not run.fits
    found = fewest_ipus(run)
    kinds = [replace(settings, recompute=kind) for kind in ("norm", "standard", "stage")]
    runs = [replace(run, settings=each) for each in kinds]
    fast = max(each.throughput for each in runs if each.fits)
    assert found[0].ipus == 1
    assert found[0].samples_per_second >= fast
