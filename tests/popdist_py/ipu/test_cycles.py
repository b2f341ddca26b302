"""Estimated cycles: they rank runs as hardware does, and follow the options of a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.links import ring_bandwidth
from popdist_py.ipu.memory import memory
from popdist_py.ipu.placed_stage import stage_of
from popdist_py.ipu.settings import ADAM, HALF_ADAM, MOMENTUM, Location, Optimizer, Settings
from popdist_py.ipu.specification import BOW, MK1, MK2
from popdist_py.ipu.stage_cycles import CycleModel, operation_cycles, stage_cycles
from popdist_py.ipu.tensor_liveness import backward_moments, forward_moments
from tools.device.ipu_graphs import mlp, resnet, transformer, with_8_bit_input, with_checkpoints

FLOAT = resnet([2, 2, 2, 2], 64, 16)
HALF = FLOAT.cast(data="float16", weights="float16")
PLACEMENT = Placement.cut(HALF, ["layer2", "layer3", "layer4"])
BASE = Settings(accumulation=8, optimizer=ADAM)


def throughput(graph=HALF, placement=PLACEMENT, ipu=MK2, **changes):
    return cycles(graph, placement, replace(BASE, **changes), ipu).throughput


def test_ranks_as_hardware_does():
    assert throughput() > throughput(strategy="sharded") > throughput(strategy="serial phased")
    assert throughput() > throughput(strategy="sequential")
    assert throughput() > throughput(FLOAT)
    assert throughput(partials="float16") > throughput()
    assert throughput(ipu=BOW) > throughput()
    half = replace(BASE, partials="float16")
    rates = [cycles(HALF, PLACEMENT, half, ipu).throughput for ipu in (BOW, MK2, MK1)]
    assert rates == sorted(rates, reverse=True)
    assert throughput(recompute="none") > throughput()
    assert throughput(device_iterations=4) > throughput()
    assert throughput(synthetic_data=True) > throughput()
    assert throughput(io_tiles=32, overlaps_io=True, device_iterations=50) > 0
    assert throughput(optimizer_location=Location(on_chip=False)) < throughput()
    assert throughput(memory_proportion=0.001) < throughput()
    many = replace(BASE, device_iterations=1000, replicas=4)
    assert cycles(HALF, PLACEMENT, many, MK2).throughput < 4 * throughput(device_iterations=1000)


def test_more_accumulation_raises_the_busy_share():
    busy = [
        cycles(HALF, PLACEMENT, replace(BASE, accumulation=count, synthetic_data=True), MK2).busy
        for count in (7, 16, 64)
    ]
    for fewer, more in pairwise(busy):
        assert all(b > a for a, b in zip(fewer, more, strict=True))
    assert all(0 < share <= 1 for share in busy[-1])


def test_device_iterations_share_the_host_s_work_for_a_call():
    one = cycles(HALF, PLACEMENT, BASE, MK2)
    four = cycles(HALF, PLACEMENT, replace(BASE, device_iterations=4), MK2)
    assert one.total == pytest.approx(one.window + one.call, abs=2)
    assert four.total == pytest.approx(4 * one.window + one.call, abs=4)
    assert four.samples == 4 * one.samples


def test_8_bit_input_is_received_in_half_of_the_time():
    small = with_8_bit_input(HALF)
    where = Placement.cut(small, ["layer2", "layer3", "layer4"])
    model = CycleModel(host_sync_seconds=0.0)
    narrow = cycles(small, where, BASE, MK2, model).stages[0].receive
    assert narrow * 2 == cycles(HALF, PLACEMENT, BASE, MK2, model).stages[0].receive
    # The images arrive at one IPU and the labels at another. Each of the two IPUs waits for both
    # transfers.
    wide = cycles(HALF, PLACEMENT, BASE, MK2).stages[0].receive
    assert wide == pytest.approx(2 * narrow + 2 * CycleModel().host_sync_seconds * MK2.clock)


def test_the_slowest_stage_decides():
    report = cycles(HALF, PLACEMENT, replace(BASE, synthetic_data=True), MK2)
    longer = cycles(HALF, PLACEMENT, replace(BASE, synthetic_data=True, accumulation=108), MK2)
    slowest = max(stage.work for stage in report.stages)
    copies = 2 * max(stage.copy for stage in report.stages)
    each = (longer.window - report.window) / 100
    assert each == pytest.approx(slowest + copies + CycleModel().sync_cycles)


def test_phases_overlap_loading_in_parallel():
    graph = resnet([2, 2, 2, 2], 64, 16, "float16")
    cut = Placement.cut(graph, ["layer2", "layer3", "layer4"])
    one = Placement(cut.stages, (0, 0, 0, 0))
    two = Placement(cut.stages, (0, 1, 0, 1))
    serial = cycles(graph, one, replace(BASE, strategy="serial phased"), MK2)
    parallel = cycles(graph, two, replace(BASE, strategy="parallel phased"), MK2)
    assert parallel.total < serial.total


@given(
    batch=st.integers(1, 32),
    stages=st.integers(1, 4),
    accumulation=st.integers(1, 12),
    strategy=st.sampled_from(["grouped", "interleaved", "sequential", "sharded"]),
)
def test_time_grows_with_work(batch, stages, accumulation, strategy):
    graph = mlp([64] * 5, batch)
    before = [f"layers.{index}" for index in range(1, stages)]
    placement = Placement.cut(graph, before)
    options = Settings(accumulation=accumulation, strategy=strategy)
    found = cycles(graph, placement, options, MK2)
    more = cycles(graph, placement, replace(options, accumulation=accumulation + 1), MK2)
    larger = cycles(graph.with_batch(batch + 8), placement, options, MK2)
    assert found.total < more.total
    assert found.total <= larger.total
    assert all(0 <= share <= 1 for share in found.busy)
    # No IPU computes longer than the run. The run is no longer than all work one after the other.
    assert found.window >= max(accumulation * stage.work for stage in found.stages)


def test_published_throughput_of_resnet_50():
    """MLPerf 1.1 has 1,875 images a second for each Mk2 and 2,627 for each Bow (half, batch 20)."""
    graph = with_checkpoints(resnet([3, 4, 6, 3], 224, 20, "float16"), ".relu3")
    options = Settings(
        accumulation=6,
        device_iterations=1000,
        replicas=16,
        partials="float16",
        recompute="stage",
        optimizer=MOMENTUM,
    )
    for ipu, images in ((MK2, 1875), (BOW, 2627)):
        found = cycles(graph, Placement.cut(graph), options, ipu)
        assert found.throughput / 16 == pytest.approx(images, rel=0.25)


def test_a_combined_optimizer_adds_gradients_to_its_state():
    graph = mlp([512] * 3, 2, "float16")
    settings = Settings(accumulation=4, replicas=2)

    def found(**parts):
        optimizer = Optimizer(**parts)
        used = replace(settings, optimizer=optimizer)
        return stage_cycles(graph, Placement.cut(graph), used, MK2, 0)

    combined = found(state=("float16",), accumulator="float32", is_combined=True)
    half = found(state=("float16",), accumulator="float16")
    wide = found(state=("float16",), accumulator="float32")
    # The accumulator of a combined optimiser does not exist, so its type has no effect.
    assert combined == found(state=("float16",), accumulator="float16", is_combined=True)
    assert combined.backward == half.backward < wide.backward
    assert combined.all_reduce == half.all_reduce < wide.all_reduce
    assert combined.update < half.update


def test_constants_are_parameters():
    slow = CycleModel(product_share=0.1)
    assert cycles(HALF, PLACEMENT, BASE, MK2, slow).total > cycles(HALF, PLACEMENT, BASE, MK2).total
    layers = transformer(4, 128, 32, 2)
    cut = Placement.cut(layers, ["layers.2"])
    assert cycles(layers, cut, Settings(accumulation=4, optimizer=HALF_ADAM), MK2).total > 0


def test_one_by_one_stages_add_up():
    options = replace(BASE, strategy="sharded", synthetic_data=True, accumulation=3)
    found = cycles(HALF, PLACEMENT, options, MK2)
    passage = sum(stage.forward + stage.backward + 2 * stage.copy for stage in found.stages)
    update = max(stage.update for stage in found.stages)
    syncs = (3 * 2 * 4 + 1) * CycleModel().sync_cycles
    assert found.window == pytest.approx(3 * passage + update + syncs, abs=2)


def test_inputs_of_the_host_have_no_gradient():
    graph = mlp([512, 512, 512], batch=8)
    forward, backward = operation_cycles(graph, Placement.cut(graph), Settings(), MK2)
    names = [operation.name for operation in graph.operations]
    first, second = names.index("layers.0"), names.index("layers.1")
    assert forward[first] == forward[second]
    # The second layer computes gradients of its weights and of its input. The first layer only
    # computes gradients of its weights.
    assert backward[first] < 0.6 * backward[second]


def test_io_tiles_save_time_only_with_overlapped_streams():
    """With large inputs and little work, I/O tiles save more time than their missing work costs."""
    graph = mlp([200_000, 64, 10], batch=64, type="float16")
    one = Placement.cut(graph)
    options = Settings(accumulation=8, device_iterations=100)
    plain = cycles(graph, one, options, MK2)
    fewer = cycles(graph, one, replace(options, io_tiles=64), MK2)
    overlapped = cycles(graph, one, replace(options, io_tiles=64, overlaps_io=True), MK2)
    # Without the overlap, the only change is that fewer tiles compute.
    assert fewer.total > plain.total
    assert overlapped.total < plain.total
    (stage,) = overlapped.stages
    assert overlapped.window >= 8 * max(stage.receive, stage.work)
    assert overlapped.window < 8 * (stage.receive + stage.work)
    # The outputs of all micro-batches are also sent while the IPU computes.
    many = replace(options, io_tiles=64, overlaps_io=True, output_mode="all")
    assert cycles(graph, one, many, MK2).total == overlapped.total
    plain_all = cycles(graph, one, replace(options, output_mode="all"), MK2)
    every = replace(options, output_mode="every n", output_return_period=10)
    assert plain.total < cycles(graph, one, every, MK2).total < plain_all.total


@pytest.mark.parametrize("name", ["weight", "accumulator", "activation", "optimizer"])
def test_streaming_memory_costs_time(name):
    location = {f"{name}_location": Location(on_chip=False)}
    base, away = (
        cycles(HALF, PLACEMENT, replace(BASE, **options), MK2) for options in ({}, location)
    )
    assert away.total > base.total
    # Optimiser state is moved once for each weight update, and other tensors for each micro-batch.
    for before, after in zip(base.stages, away.stages, strict=True):
        assert (after.offload > before.offload == 0) == (name != "optimizer")
        assert (after.update > before.update) == (name in ("optimizer", "weight"))
    elements = sum(w.elements for w in PLACEMENT.weights_of(HALF, 0) if w.is_trained)
    if name == "accumulator":
        per_cycle = MK2.streaming_bandwidth / MK2.clock
        assert away.stages[0].offload == pytest.approx(2 * 4 * elements / per_cycle)


def test_an_operation_s_own_proportion_makes_it_slower():
    low = tuple(
        replace(o, memory_proportion=1e-4) if o.kind == "product" else o for o in HALF.operations
    )
    assert throughput(replace(HALF, operations=low)) < throughput()


@given(
    blocks=st.lists(st.integers(1, 2), min_size=4, max_size=4),
    batch=st.integers(1, 32),
    is_half=st.booleans(),
    shares=st.lists(st.floats(0.01, 1), min_size=2, max_size=2).map(sorted),
    of_matmuls=st.booleans(),
)
def test_a_larger_proportion_takes_no_less_memory_and_no_more_cycles(
    blocks, batch, is_half, shares, of_matmuls
):
    graph = resnet(blocks, 64, batch, "float16" if is_half else "float32")
    name = "matmul_proportion" if of_matmuls else "memory_proportion"

    def found(share):
        options = replace(BASE, recompute="none", **{name: share})
        where = Placement.cut(graph)
        (own,) = memory(graph, where, options, MK2).ipus
        stage = stage_of(graph, where, options, MK2, 0)
        temporaries = [moment.temporary for moment in backward_moments(stage, stage.saved)]
        return own.not_always_live, temporaries, cycles(graph, where, options, MK2).total

    (least, small, slow), (most, large, fast) = map(found, shares)
    assert least <= most
    assert all(one <= other for one, other in zip(small, large, strict=True))
    assert slow >= fast


def test_proportions_from_0_05_to_0_6_change_memory_and_time_of_resnet_50():
    """Larger proportions need more memory, up to the share of the largest convolution."""
    graph = resnet([3, 4, 6, 3], 224, 8, "float16")
    where = Placement.cut(graph)
    needed, taken = [], []
    for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        options = replace(BASE, recompute="stage", memory_proportion=share)
        needed.append(memory(graph, where, options, MK2).fullest.needed)
        taken.append(cycles(graph, where, options, MK2).total)
    assert all(less < more for less, more in pairwise(needed))
    assert all(slower > faster for slower, faster in pairwise(taken))


def test_each_kind_of_product_has_a_proportion():
    graph = resnet([1, 1, 1, 1], 64, 64, "float16")
    where = Placement.cut(graph)

    def temporaries(**options):
        stage = stage_of(graph, where, replace(BASE, **options), MK2, 0)
        return {m.name.split()[0]: m.temporary for m in forward_moments(stage)}

    before, after = temporaries(), temporaries(matmul_proportion=1e-4)
    assert {name for name in before if before[name] != after[name]} == {"fc"}
    before, after = (
        temporaries(matmul_proportion=0.6),
        temporaries(matmul_proportion=0.6, memory_proportion=1e-4),
    )
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {o.name for o in graph.operations if o.product} - {"fc"}


@given(
    works=st.lists(st.integers(1, 64), min_size=2, max_size=5),
    batch=st.integers(1, 32),
    more=st.integers(0, 8),
    recompute=st.sampled_from(["none", "stage"]),
)
def test_an_interleaved_pipeline_stashes_no_more_and_is_no_faster(works, batch, more, recompute):
    graph = mlp([64, *(16 * work for work in works)], batch)
    where = Placement.cut(graph, [f"layers.{index}" for index in range(1, len(works))])

    def found(strategy, accumulation):
        # With real data, transfers from the host take longer than the work of this small model.
        options = replace(
            BASE,
            strategy=strategy,
            accumulation=accumulation,
            recompute=recompute,
            synthetic_data=True,
        )
        report = memory(graph, where, options, MK2)
        stash = [own.by_category().get("stash", 0) for own in report.ipus]
        return stash, cycles(graph, where, options, MK2).window

    count = 2 * len(works) - 1 + more
    (kept, taken), (less, longer) = found("grouped", count), found("interleaved", count)
    assert all(one <= other for one, other in zip(less, kept, strict=True))
    assert longer >= taken
    # The cycles that each further micro-batch of a full pipeline adds.
    assert found("interleaved", count + 1)[1] - longer >= found("grouped", count + 1)[1] - taken


@pytest.mark.parametrize("strategy", ["grouped", "interleaved"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_recomputation_in_pipelines_takes_more_cycles_and_less_memory(strategy, stages):
    graph = resnet([1, 1, 1, 1], 64, 16, "float16")
    where = Placement.cut(graph, ["layer1", "layer2", "layer3", "layer4"][: stages - 1])

    def found(recompute):
        options = Settings(accumulation=9, strategy=strategy, recompute=recompute)
        report = memory(graph, where, options, MK2)
        return [own.needed for own in report.ipus], cycles(graph, where, options, MK2).total

    (less, slow), (more, fast) = found("stage"), found("none")
    assert slow > fast
    assert all(one < other for one, other in zip(less[:-1], more[:-1], strict=True))
    # The last stage runs its backward pass at once, so it does not recompute.
    assert less[-1] == more[-1]


def test_repeated_products_take_a_launch_each_time():
    """A recurrent layer of 20 steps is compared with one matrix product of equal flops."""
    graph = mlp([64, 64], batch=8)
    layer, loss = graph.operations
    sizes = layer.product

    def forward(product):
        other = replace(graph, operations=(replace(layer, product=product), loss))
        return operation_cycles(other, Placement.cut(other), Settings(), MK2)[0][0]

    once = forward(sizes)
    assert forward(replace(sizes, repeats=20)) == pytest.approx(20 * once)
    assert forward(replace(sizes, rows=20)) < 20 * once


def test_synthetic_data_removes_only_transfers():
    """Without transfers from the host, its other work for each call stays."""
    real, synthetic = (
        cycles(HALF, PLACEMENT, replace(BASE, synthetic_data=value), MK2) for value in (False, True)
    )
    assert synthetic.call == round(CycleModel().call_seconds * MK2.clock)
    assert real.call > synthetic.call
    assert all(stage.receive == 0 for stage in synthetic.stages)
    assert real.window > synthetic.window


def test_each_returned_micro_batch_is_a_transfer():
    def call(mode):
        return cycles(HALF, PLACEMENT, replace(BASE, output_mode=mode), MK2).call

    sync = CycleModel().host_sync_seconds * MK2.clock
    size = 16 * 1000 * 2 * MK2.clock / CycleModel().host_bandwidth
    assert call("all") - call("final") == pytest.approx(7 * (sync + size), rel=1e-3)


def test_the_sides_of_products_are_padded_to_the_matrix_unit():
    graph = mlp([512, 512], batch=8, type="float16")
    layer, loss = graph.operations

    def forward(**sizes):
        other = replace(layer, product=replace(layer.product, **sizes))
        changed = replace(graph, operations=(other, loss))
        model = CycleModel(product_share=1e-6)
        return operation_cycles(changed, Placement.cut(changed), Settings(), MK2, model)[0][0]

    # Arithmetic is slow in this model, so other parts of the product's time are negligible.
    assert forward(columns=505) == pytest.approx(forward(), rel=1e-3)
    assert forward(depth=497) == pytest.approx(forward(), rel=1e-3)
    assert forward(columns=504) < 0.99 * forward()
    assert forward(depth=496) < 0.98 * forward()
    groups = {"is_convolution": True, "count": 512}
    narrow, wide = (forward(depth=9, columns=columns, **groups) for columns in (1, 8))
    assert wide == pytest.approx(8 * narrow, rel=0.01)


def test_an_optimizer_with_more_state_updates_longer():
    taken = [
        cycles(HALF, PLACEMENT, replace(BASE, optimizer=optimizer), MK2).stages[0].update
        for optimizer in (Settings().optimizer, MOMENTUM, ADAM)
    ]
    trained = sum(w.is_trained for w in PLACEMENT.weights_of(HALF, 0))
    for fewer, more in pairwise(taken):
        assert more - fewer > trained * CycleModel().operation_cycles


# The IPUs of a replica, the replicas, and the bytes per second of each ring.
RINGS = [
    (1, 2, 32e9),
    (1, 4, 32e9),
    (2, 2, 32e9),
    (1, 16, 32e9),
    (2, 8, 16e9),
    (4, 4, 8e9),
    (16, 4, 8e9),
    (1, 128, 25e9),
    (4, 32, 6.25e9),
]


@pytest.mark.parametrize(("ipus", "replicas", "rate"), RINGS)
def test_the_rate_of_an_all_reduce_depends_on_where_the_replicas_are(ipus, replicas, rate):
    assert ring_bandwidth(MK2, replicas, ipus, 0.2) == pytest.approx(rate)
    assert ring_bandwidth(MK2, replicas, ipus, 0.01) == pytest.approx(1.6e9)


def test_an_all_reduce_sends_its_bytes_and_synchronises_each_step():
    """Each replica sends 2 (R - 1) / R of the gradients in 2 (R - 1) steps."""
    graph = mlp([1024, 1024], batch=8)
    gradients = 4 * (1024 * 1024 + 1024)
    for replicas in (1, 2, 4, 64):
        options = Settings(replicas=replicas)
        (stage,) = cycles(graph, Placement.cut(graph), options, MK2).stages
        steps = 2 * (replicas - 1)
        seconds = gradients * steps / replicas / 32e9
        taken = seconds * MK2.clock + steps * CycleModel().sync_cycles
        assert stage.all_reduce == pytest.approx(taken, rel=1e-4)
