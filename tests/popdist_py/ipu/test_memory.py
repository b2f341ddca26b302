"""The memory of each IPU: bytes in closed form, effects of options, and rules for every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory, stash_depth, walks
from popdist_py.ipu.memory_contents import IpuMemory, MemoryReport, verdict_of
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, SGD, Location, Optimizer, Settings
from popdist_py.ipu.specification import MK1, MK2
from tools.device.ipu_graphs import cnn, mlp, resnet, transformer, with_checkpoints

OFF_CHIP = Location(on_chip=False)
# Weights computed by hand: matrices and biases, kernels, norms.
MLP = 10 * 20 + 20 + 20 * 5 + 5
CNN = 3 * 8 * 9 + 2 * 8 + 512 * 10 + 10
STATISTICS = 2 * 8
LAYER = 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 4 * 64


def categories(graph, *, before=(), **options):
    placement = Placement.cut(graph, before)
    report = memory(graph, placement, Settings(**options), MK2)
    return [ipu.by_category() for ipu in report.ipus]


@pytest.mark.parametrize(
    ("graph", "trained", "fixed"),
    [
        (mlp([10, 20, 5], batch=4), MLP, 0),
        (cnn(batch=4), CNN, STATISTICS),
        (transformer(1, 64, 16, 4, type="float32"), LAYER, 0),
    ],
    ids=["mlp", "cnn", "transformer layer"],
)
def test_variables_in_closed_form(graph, trained, fixed):
    (plain,) = categories(graph)
    assert plain["weights"] == 4 * (trained + fixed)
    assert "accumulators" not in plain
    assert "optimiser state" not in plain
    (adam,) = categories(graph, optimizer=ADAM, accumulation=2)
    assert adam["accumulators"] == 4 * trained
    assert adam["optimiser state"] == 8 * trained
    half = graph.cast(data="float16", weights="float16")
    (types,) = categories(half, optimizer=HALF_ADAM, accumulation=2)
    assert types["weights"] == 2 * (trained + fixed)
    assert types["accumulators"] == 2 * trained
    assert types["optimiser state"] == 6 * trained
    combined = Optimizer(state=("float32",), is_combined=True)
    (one,) = categories(graph, optimizer=combined, accumulation=2)
    assert "accumulators" not in one
    assert one["optimiser state"] == 4 * trained
    (inference,) = categories(graph, is_training=False, optimizer=ADAM)
    assert not {"accumulators", "optimiser state", "gradients", "stash"} & set(inference)


def test_stashes_in_closed_form():
    graph = mlp([8] * 7, batch=2)
    before = [f"layers.{index}" for index in (1, 2, 3)]
    full = categories(graph, before=before, accumulation=7, recompute="none")
    # A stage keeps its input and the result of its ReLU, each with 2 x 8 elements of 4 bytes. ReLU
    # works in place, and its result is the input of the next stage.
    one = 2 * 8 * 4
    assert [parts.get("stash", 0) for parts in full] == [7 * 2 * one, 5 * 2 * one, 3 * 2 * one, 0]
    again = categories(graph, before=before, accumulation=7)
    assert [parts.get("stash", 0) for parts in again] == [7 * one, 5 * one, 3 * one, 0]
    turns = categories(graph, before=before, accumulation=7, strategy="interleaved")
    assert [parts.get("stash", 0) for parts in turns] == [4 * one, 3 * one, 2 * one, 0]
    away = categories(graph, before=before, accumulation=7, activation_location=OFF_CHIP)
    sharded = categories(graph, before=before, accumulation=7, strategy="sharded")
    assert not any(parts.get("stash") for parts in away + sharded)


def test_stash_depths_are_popart_s():
    depths = {n: [stash_depth(s, n, Settings(accumulation=9)) for s in range(n)] for n in (2, 3, 4)}
    assert depths == {2: [3, 0], 3: [5, 3, 0], 4: [7, 5, 3, 0]}


@pytest.mark.parametrize(
    ("name", "category", "elements"),
    [
        ("weight_location", "weights", 4 * CNN),
        ("accumulator_location", "accumulators", 4 * CNN),
        ("optimizer_location", "optimiser state", 8 * CNN),
    ],
)
def test_locations_of_variables(name, category, elements):
    options = {"optimizer": ADAM, "accumulation": 2, "replicas": 4}
    (away,) = categories(cnn(4), **options, **{name: OFF_CHIP})
    assert away.get(category, 0) == 0
    (large,) = categories(
        cnn(4), **options, **{name: Location(on_chip=False, min_off_chip=512 * 10)}
    )
    assert large[category] < elements // 10
    (shared,) = categories(
        cnn(4), **options, **{name: Location(is_sharded=True, min_sharded=512 * 10)}
    )
    width = elements // CNN
    statistics = 4 * STATISTICS if category == "weights" else 0
    assert shared[category] == elements + statistics - width * (512 * 10 * 3 // 4)


def test_options_that_save_memory_do_so():
    graph = with_checkpoints(resnet([3, 4, 6, 3], 224, 8), ".relu3")
    placement = Placement.cut(graph, ["layer3.0"])
    base = Settings(accumulation=4, optimizer=ADAM)

    def needed(settings=base, graph=graph, placement=placement):
        return sum(ipu.needed for ipu in memory(graph, placement, settings, MK2).ipus)

    assert needed(replace(base, recompute="none")) > needed(replace(base, recompute="norm"))
    assert needed(replace(base, recompute="norm")) > needed()
    one = {"placement": Placement.cut(graph), "settings": replace(base, recompute="stage")}
    assert needed(graph=resnet([3, 4, 6, 3], 224, 8), **one) > needed(**one)
    assert needed(replace(base, memory_proportion=0.05)) < needed()
    assert needed(replace(base, partials="float16"), graph.cast(data="float16")) < needed(
        graph=graph.cast(data="float16")
    )
    assert needed(replace(base, optimizer_location=OFF_CHIP)) < needed()
    assert needed(replace(base, strategy="sequential", recompute="stage")) <= needed()
    assert needed(replace(base, strategy="serial phased")) < needed(
        replace(base, strategy="sharded")
    )
    assert needed(graph=graph.cast(data="float16", weights="float16")) < 0.75 * needed()
    single = memory(graph, Placement.cut(graph), base, MK2).fullest.needed
    assert single > memory(graph, placement, base, MK2).fullest.needed
    fewer = memory(graph, placement, replace(base, io_tiles=64), MK2).fullest
    assert fewer.capacity == MK2.memory - 64 * MK2.tile_bytes


@pytest.mark.parametrize("optimizer_location", [Location(), OFF_CHIP])
def test_phases_fetch_the_tensors_that_they_read(optimizer_location):
    """Phases fetch weights forward, accumulators backward, and one weight's state at its update."""
    graph = mlp([4096, 4096, 4096, 4096], batch=1)
    one = Placement.cut(graph)
    kept = {"optimizer_location": optimizer_location, "strategy": "serial phased"}
    training = Settings(accumulation=4, optimizer=ADAM, **kept)
    inference = Settings(is_training=False, optimizer=ADAM, **kept)
    size = sum(weight.bytes for weight in graph.weights)
    (needed,) = (ipu.by_category() for ipu in memory(graph, one, inference, MK2).ipus)
    assert needed["weights"] == size
    assert not {"accumulators", "optimiser state"} & set(needed)
    walked = [(sum(p.bytes for p in fetched), moments[-1].name)
              for fetched, moments in walks(graph, one, training, MK2, 0)]  # fmt: skip
    assert [fetched for fetched, _ in walked] == [size, 2 * size, 2 * size]
    own = memory(graph, one, training, MK2).fullest
    largest = max(weight.elements for weight in graph.weights)
    # The update needs the weight's change and two moments, all in float32.
    assert own.by_category()["working set"] == 3 * 4 * largest


def test_serialized_products_need_less():
    graph = transformer(1, 256, 64, 8, words=20_000, type="float32")
    parts = [
        replace(o, product=replace(o.product, serial=8)) if o.name == "head" else o
        for o in graph.operations
    ]
    (whole,), (cut,) = categories(graph), categories(replace(graph, operations=tuple(parts)))
    assert cut["working set"] < whole["working set"]


@given(
    batch=st.integers(1, 64),
    more=st.integers(1, 64),
    stages=st.integers(1, 3),
    recompute=st.sampled_from(["default", "none", "norm", "stage"]),
    strategy=st.sampled_from(["grouped", "interleaved", "sharded", "serial phased"]),
)
def test_memory_is_monotone_in_the_batch(batch, more, stages, recompute, strategy):
    graph = resnet([1, 1, 1, 1], 32, batch)
    placement = Placement.cut(graph, ["layer2", "layer3"][: stages - 1])
    options = Settings(accumulation=5, recompute=recompute, strategy=strategy)
    small = memory(graph, placement, options, MK2)
    large = memory(graph.with_batch(batch + more), placement, options, MK2)
    for before, after in zip(small.ipus, large.ipus, strict=True):
        assert after.needed >= before.needed
        # The needed memory is never below the largest tensor that an operation needs.
        assert before.not_always_live >= max(
            graph.bytes_of(o.output.name)
            for o, s in zip(graph.operations, placement.stages, strict=True)
            if placement.ipus[s] == before.ipu
        )


def test_parts_add_up():
    graph = resnet([3, 4, 6, 3], 64, 8)
    report = memory(graph, Placement.cut(graph, ["layer3.0"]), Settings(accumulation=3), MK2)
    for ipu in report.ipus:
        assert ipu.needed == ipu.always_live + ipu.not_always_live
        assert ipu.needed == sum(ipu.by_category().values())
        assert ipu.per_tile == -(-ipu.needed // 1472)
        assert list(ipu.largest()) == sorted(ipu.largest(), key=lambda part: -part.bytes)


def test_runs_that_are_known_to_fit():
    """ResNet-50 with recomputation, half precision and batch 20 fits on one Mk2, as published."""
    graph = with_checkpoints(resnet([3, 4, 6, 3], 224, 20, "float16"), ".relu3")
    one = Placement.cut(graph)
    options = Settings(accumulation=6, optimizer=MOMENTUM, recompute="stage")
    assert memory(graph, one, options, MK2).fits
    assert not memory(graph, one, replace(options, recompute="none"), MK2).fits
    assert not memory(graph, one, options, MK1).fits
    # The tutorial trains this MNIST model on one IPU.
    small = mlp([784, 128, 10], batch=40)
    assert memory(small, Placement.cut(small), Settings(optimizer=SGD), MK1).fits


def test_the_last_stage_recomputes_if_the_settings_say_so():
    graph = with_checkpoints(transformer(8, 256, 128, 8), ".norm")
    placement = Placement.cut(graph, ["layers.2"])
    base = Settings(accumulation=4)
    before = memory(graph, placement, base, MK2)
    after = memory(graph, placement, replace(base, recomputes_last=True), MK2)
    assert after.ipus[0] == before.ipus[0]
    assert after.ipus[1].not_always_live < before.ipus[1].not_always_live
    assert after.ipus[1].always_live <= before.ipus[1].always_live


def test_peaks_of_a_cnn_and_a_transformer_layer_in_closed_form():
    """If matrix products need no temporary memory, the peaks are equal to sums computed by hand."""
    options = Settings(recompute="none", memory_proportion=1e-12)
    # At the backward pass of the pool, all images and maps are live. The gradients of the pool's
    # output and input are also live.
    graph = cnn(batch=4)
    (own,) = memory(graph, Placement.cut(graph), options, MK2).ipus
    images, maps, pooled = 4 * 3 * 16**2 * 4, 4 * 8 * 16**2 * 4, 4 * 8 * 8**2 * 4
    assert own.peak_at == "pool (backward)"
    assert own.not_always_live == images + 2 * maps + pooled + maps + pooled
    # At the backward pass of the second feed-forward product, 15 blocks of tokens and the scores
    # are live. The gradients of its output, of the residual, of its input and of its weights are
    # also live.
    graph = transformer(1, 64, 16, 3, heads=2)
    (own,) = memory(graph, Placement.cut(graph), options, MK2).ipus
    tokens, scores = 3 * 16 * 64 * 2, 3 * 2 * 16**2 * 2
    assert own.peak_at == "layers.0.outer (backward)"
    assert own.not_always_live == (15 + 1 + 1 + 4) * tokens + scores + (256 * 64 + 64) * 2


def test_the_fullest_tile_holds_the_rest_of_every_tensor():
    """One element more than fills all tiles evenly adds a grain to the fullest tile."""
    row = 1472 * 16 // 4
    graph = mlp([1, row, 1], batch=1)
    options = Settings(is_training=False, memory_proportion=1e-12, synthetic_data=True)
    even = memory(graph, Placement.cut(graph), options, MK2).fullest
    graph = mlp([1, row + 1, 1], batch=1)
    uneven = memory(graph, Placement.cut(graph), options, MK2).fullest
    # Two matrices, a bias and the hidden tensor each add a grain.
    assert uneven.fullest_tile - even.fullest_tile == 4 * 16
    assert even.fullest_tile >= even.per_tile
    # Many small tensors make one tile fuller than the others.
    norms = resnet([3, 4, 23, 3], 64, 1)
    report = memory(norms, Placement.cut(norms), Settings(accumulation=2, optimizer=ADAM), MK2)
    assert 4 * 200 * 8 < report.fullest.fullest_tile - report.fullest.per_tile < 32 * 1024


def test_buffers_of_overlapped_streams_lie_on_io_tiles_and_have_to_fit_there():
    graph = mlp([100_000, 10], batch=256)
    (plain,) = categories(graph, io_tiles=32)
    assert plain["streams"] == 256 * (100_000 * 4 + 4 + 10 * 4) + 4
    (overlapped,) = categories(graph, io_tiles=32, overlaps_io=True)
    assert "streams" not in overlapped
    options = Settings(io_tiles=32, overlaps_io=True)
    (own,) = memory(graph, Placement.cut(graph), options, MK2).ipus
    assert own.fullest_tile < own.tile_bytes < own.fullest_io_tile
    assert not own.fits
    more = replace(options, io_tiles=192)
    assert memory(graph, Placement.cut(graph), more, MK2).fits


SAVING = [
    {"optimizer_location": OFF_CHIP},
    {"optimizer_location": Location(is_sharded=True, min_sharded=1)},
    {"accumulator_location": OFF_CHIP},
    {"weight_location": OFF_CHIP},
    {"activation_location": OFF_CHIP},
    {"optimizer": HALF_ADAM},
    {"optimizer": MOMENTUM},
    {"optimizer": SGD},
    {"partials": "float16"},
    {"memory_proportion": 0.05},
    {"recompute": "stage"},
    {"strategy": "interleaved"},
    {"strategy": "sharded", "recompute": "stage"},
    {"synthetic_data": True},
]


@given(
    blocks=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    batch=st.integers(1, 32),
    stages=st.integers(1, 4),
    accumulation=st.integers(1, 8),
    is_half=st.booleans(),
    saving=st.sampled_from(SAVING),
)
def test_options_that_should_save_memory_never_cost_memory(
    blocks, batch, stages, accumulation, is_half, saving
):
    graph = resnet(blocks, 32, batch, "float16" if is_half else "float32")
    placement = Placement.cut(graph, ["layer2", "layer3", "layer4"][: stages - 1])
    base = Settings(accumulation=accumulation, optimizer=ADAM, recompute="none", replicas=2)
    before = memory(graph, placement, base, MK2)
    after = memory(graph, placement, replace(base, **saving), MK2)
    for more, less in zip(before.ipus, after.ipus, strict=True):
        assert less.needed <= more.needed
        assert less.fullest_tile <= more.fullest_tile


def test_updates_fetch_states_that_are_stored_elsewhere():
    """The update of the largest weight needs its change, and the states that are fetched for it."""
    graph = mlp([4096, 4096], batch=1)
    largest = 4096 * 4096

    def at_update(**location):
        options = Settings(
            optimizer=ADAM, replicas=4, accumulation=2, optimizer_location=Location(**location)
        )
        options = replace(options, memory_proportion=1e-6)
        (own,) = memory(graph, Placement.cut(graph), options, MK2).ipus
        assert own.peak_at == "layers.0.weight (update)"
        return own.by_category()["working set"]

    assert at_update(on_chip=False) == largest * (4 + 8)
    # The change of a quarter and the gathered weight need more than the change, the gradients and
    # the states.
    assert at_update(on_chip=False, is_sharded=True) == largest * (1 + 4)


def update_bytes(weights="float32", **options):
    """Return the bytes that the update of the largest weight needs for each of its elements."""
    graph = mlp([4096, 4096], batch=1).cast(data=weights, weights=weights)
    settings = Settings(accumulation=2, **options)
    *_, (_, moments) = walks(graph, Placement.cut(graph), settings, MK2, 0)
    (own,) = (moment.temporary for moment in moments if moment.name == "layers.0.weight (update)")
    return own / 4096**2


@pytest.mark.parametrize(
    ("weights", "optimizer", "width"),
    [
        ("float32", SGD, 0),
        ("float16", SGD, 0),
        ("float32", MOMENTUM, 4),
        ("float16", HALF_ADAM, 2),
        ("float16", ADAM, 2),
    ],
    ids=["float, no state", "half, no state", "float", "float second moments", "float states"],
)
def test_a_change_has_the_type_of_its_weight(weights, optimizer, width):
    assert update_bytes(weights, optimizer=optimizer) == width


def test_an_update_of_a_part_gathers_the_whole_weight():
    sharded = Location(is_sharded=True)
    four = {"optimizer": ADAM, "replicas": 4}
    # Each replica computes the change of a quarter, and gathers the weight from the other replicas.
    assert update_bytes(**four, optimizer_location=sharded) == 1 + 4
    assert update_bytes("float16", **four, optimizer_location=sharded) == 0.5 + 2
    # One replica has nothing to gather.
    assert update_bytes(optimizer=ADAM, replicas=1, optimizer_location=sharded) == 4
    # If each replica stores a quarter of the weight, the weight is not gathered. The update needs
    # the change, the sum of gradients and the states of this quarter.
    assert update_bytes(**four, optimizer_location=sharded, weight_location=sharded) == 1 + 1
    away = replace(sharded, on_chip=False)
    assert update_bytes(**four, optimizer_location=away, weight_location=sharded) == 1 + 1 + 2


def test_an_update_fetches_weights_and_accumulators():
    away = Location(on_chip=False)
    assert update_bytes(optimizer=ADAM, weight_location=away) == 4 + 4
    assert update_bytes(optimizer=HALF_ADAM, accumulator_location=away) == 4 + 2
    assert update_bytes(optimizer=ADAM, optimizer_location=away) == 4 + 8


def test_a_combined_state_stays_on_the_chip_and_has_no_accumulator():
    combined = Optimizer(state=("float32",), is_combined=True)
    graph = mlp([64, 64], batch=2)
    plain = Settings(optimizer=combined, accumulation=4)
    away = Location(on_chip=False)
    elsewhere = replace(plain, optimizer_location=away, accumulator_location=away)
    cut = Placement.cut(graph)
    assert memory(graph, cut, elsewhere, MK2) == memory(graph, cut, plain, MK2)
    assert cycles(graph, cut, elsewhere, MK2) == cycles(graph, cut, plain, MK2)


def test_a_weight_of_another_ipu_is_copied_while_it_is_used():
    graph = transformer(1, 64, 8, 1, words=1000)
    cut = Placement.cut(graph, ["head"])
    moments = {m.name: m for _, of in walks(graph, cut, Settings(), MK2, 1) for m in of}
    here = {
        m.name: m for _, of in walks(graph, Placement.cut(graph), Settings(), MK2, 0) for m in of
    }
    for name in ("head (forward)", "head (backward)"):
        assert moments[name].temporary - here[name].temporary == 1000 * 64 * 2


def test_an_ipu_with_two_stages_has_the_worst_of_both_and_the_variables_of_both():
    graph = mlp([64, 64, 64, 4096, 64], batch=256)
    apart = Placement.cut(graph, ["layers.1", "layers.2"])
    back = Placement(apart.stages, (0, 1, 0))
    options = Settings(accumulation=5, recompute="none")
    three = memory(graph, apart, options, MK2).ipus
    two = memory(graph, back, options, MK2).ipus
    assert len(two) == 2
    assert two[0].peak_at == three[2].peak_at
    assert two[0].not_always_live == three[2].not_always_live > three[0].not_always_live
    weights = [ipu.by_category()["weights"] for ipu in three]
    assert two[0].by_category()["weights"] == weights[0] + weights[2]
    assert two[1] == three[1]


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.5, "fits"), (0.95, "fits"), (0.951, "close"), (1.05, "close"), (1.051, "does not fit")],
)
def test_near_the_limit_the_verdict_is_close(share, verdict):
    assert verdict_of(share) == verdict
    tile = 100_000
    sizes = tile // 2, round(share * tile)
    report = MemoryReport(tuple(IpuMemory(n, 1, tile, (), "", s) for n, s in enumerate(sizes)))
    assert report.verdict == verdict
    assert report.share == pytest.approx(share)
    assert report.fits == (verdict == "fits")
    # A full I/O tile decides the verdict like any other tile.
    own = IpuMemory(0, 1, tile, (), "", 0, 2, round(share * tile))
    assert own.verdict == verdict
