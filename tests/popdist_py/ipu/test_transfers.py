"""The bytes that IPUs exchange with each other, the host and Streaming Memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from popdist_py.ipu.accumulation_window import lay_out, window_length
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.settings import ADAM, Location, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.stage_cycles import CYCLE_MODEL, stage_cycles
from popdist_py.ipu.transfers import (
    Traffic,
    all_reduce_bytes,
    copied_bytes,
    copied_gradients,
    fetched_bytes,
    host_traffic,
    request_bytes,
    streamed_bytes,
)
from tools.device.ipu_graphs import Builder, mlp, transformer

GRAPH = mlp([10, 20, 30, 5], batch=4)
PLACEMENT = Placement.cut(GRAPH, ["layers.1", "layers.2"])


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 1),
        ({"output_mode": "sum"}, 1),
        ({"output_mode": "all"}, 10),
        ({"output_mode": "every n", "output_return_period": 2}, 5),
        ({"output_mode": "every n"}, 10),
    ],
    ids=str,
)
def test_host_traffic(options, times):
    settings = Settings(accumulation=5, device_iterations=2, **options)
    assert host_traffic(GRAPH, PLACEMENT, settings) == (
        Traffic(10 * 4 * 10 * 4, 0),
        Traffic(0, 0),
        Traffic(10 * 4 * 4, times * (4 * 5 * 4 + 4)),
    )


def test_inference_returns_everything_and_synthetic_data_nothing():
    inference = Settings(is_training=False, device_iterations=3)
    assert host_traffic(GRAPH, PLACEMENT, inference)[2].sent == 3 * (4 * 5 * 4 + 4)
    none = Settings(accumulation=5, synthetic_data=True)
    assert set(host_traffic(GRAPH, PLACEMENT, none)) == {Traffic(0, 0)}


def test_tiles_send_requests_for_transfers_with_the_host():
    settings = Settings(accumulation=5, device_iterations=2)
    # In ten micro-batches, two tiles read 160 bytes of data and one tile reads 16 bytes of labels.
    # The scores and the loss are sent once.
    sent = (10 * 2 * 12, 0, 10 * 12 + 12 + 12)
    assert request_bytes(GRAPH, PLACEMENT, settings, MK2) == sent
    none = Settings(accumulation=5, synthetic_data=True)
    assert request_bytes(GRAPH, PLACEMENT, none, MK2) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "tiles"),
    [({}, 1472), ({"io_tiles": 64}, 1408), ({"io_tiles": 64, "overlaps_io": True}, 64)],
    ids=str,
)
def test_requests_come_from_the_tiles_of_the_stream(options, tiles):
    wide = mlp([10_000, 5], batch=40)
    placement = Placement.cut(wide)
    settings = Settings(is_training=False, **options)
    # Nine tiles hold 800 bytes of scores, two hold 160 bytes of labels, and one holds the loss.
    assert request_bytes(wide, placement, settings, MK2) == (12 * (tiles + 2 + 9 + 1),)


def test_gradients_of_a_mask_are_not_copied():
    build = Builder(2, "float16")
    x, ids = build.input("x", 64), build.input("ids", 64, "int32")
    mask = build.add("mask", "elementwise", [ids], 64)
    x = build.linear("fc", x, 1, (64, 32))
    graph = build.graph([build.add("loss", "loss", [x, mask], 1)])
    cut = Placement.cut(graph, ["loss"])
    sent = graph.bytes_of("mask:out") + graph.bytes_of(x)
    assert copied_bytes(graph, cut, 0) == sent
    assert copied_gradients(graph, cut, 0) == graph.bytes_of(x) == 2 * 32 * 2
    for training, returned in ((True, graph.bytes_of(x)), (False, 0)):
        settings = Settings(is_training=training, accumulation=9 if training else 1)
        found = stage_cycles(graph, cut, settings, MK2, 0)
        assert found.copy_gradients * sent == pytest.approx(found.copy * returned)
        without = replace(found, copy_gradients=0.0), stage_cycles(graph, cut, settings, MK2, 1)
        both = found, without[1]
        lengths = [window_length(each, cut, settings, CYCLE_MODEL) for each in (without, both)]
        cycles = lay_out(both, cut, settings, CYCLE_MODEL).schedule.num_cycles
        assert lengths[1] - lengths[0] == pytest.approx(cycles * found.copy_gradients)


def test_copies_between_stages():
    sizes = [copied_bytes(GRAPH, PLACEMENT, stage) for stage in range(3)]
    assert sizes == [4 * 20 * 4, 4 * 30 * 4, 0]
    same = Placement(PLACEMENT.stages, (0, 0, 1))
    assert [copied_bytes(GRAPH, same, stage) for stage in range(3)] == [0, 4 * 30 * 4, 0]
    # A tensor that two later stages read is sent once.
    layers = transformer(2, 64, 16, 1)
    cut = Placement.cut(layers, ["layers.1"])
    assert copied_bytes(layers, cut, 0) == 16 * 64 * 2


def test_updates_move_the_tensors_off_the_chip():
    elements = sum(weight.elements for weight in GRAPH.weights)
    away = Location(on_chip=False)
    settings = Settings(optimizer=ADAM, optimizer_location=away)
    assert streamed_bytes(GRAPH.weights, settings) == 2 * 8 * elements
    assert streamed_bytes(GRAPH.weights, Settings(optimizer=ADAM)) == 0
    shared = Location(on_chip=False, is_sharded=True, min_sharded=1)
    settings = Settings(optimizer=ADAM, optimizer_location=shared, replicas=5)
    assert streamed_bytes(GRAPH.weights, settings) == 2 * 8 * elements // 5
    assert all_reduce_bytes(GRAPH.weights, Settings(replicas=4)) == 2 * 4 * elements * 3 // 4
    assert all_reduce_bytes(GRAPH.weights, Settings()) == 0


def test_each_micro_batch_fetches_the_tensors_off_the_chip():
    elements = sum(weight.elements for weight in GRAPH.weights)
    away = Location(on_chip=False)
    settings = Settings(weight_location=away, accumulation=3)
    assert fetched_bytes(GRAPH.weights, settings) == 2 * 4 * elements
    settings = Settings(accumulator_location=away, accumulation=3)
    assert fetched_bytes(GRAPH.weights, settings) == 2 * 4 * elements
    # Without accumulation, a run has no accumulators. Inference has no backward pass.
    assert fetched_bytes(GRAPH.weights, Settings(accumulator_location=away)) == 0
    inference = Settings(weight_location=away, is_training=False)
    assert fetched_bytes(GRAPH.weights, inference) == 4 * elements
