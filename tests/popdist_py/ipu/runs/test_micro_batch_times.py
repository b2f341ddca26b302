"""The times of micro-batches: in order, inside the call, and in agreement with the schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.cycles import cycles, cycles_and_window
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.runs.micro_batch_times import timeline
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Location, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp, resnet

GRAPH = mlp([512] * 5, 64)


def pieces_of(run):
    _, window = cycles_and_window(run.graph, run.placement, run.settings, run.ipu)
    return window.pieces()


@given(
    stages=st.integers(1, 4),
    is_training=st.booleans(),
    window=st.integers(1, 9),
    device_iterations=st.integers(1, 3),
    strategy=st.sampled_from(
        ["grouped", "interleaved", "sequential", "sharded", "serial phased", "parallel phased"]
    ),
    output_mode=st.sampled_from(["all", "every n"]),
    overlaps_io=st.booleans(),
    on_chip=st.booleans(),
)
def test_every_micro_batch_passes_once_and_in_order(
    stages, is_training, window, device_iterations, strategy, output_mode, overlaps_io, on_chip
):
    placement = Placement.cut(GRAPH, [f"layers.{n}" for n in range(1, stages)])
    settings = Settings(
        is_training=is_training,
        accumulation=window if is_training else 1,
        device_iterations=device_iterations,
        strategy=strategy,
        output_mode=output_mode,
        output_return_period=device_iterations,
        io_tiles=32 * overlaps_io,
        overlaps_io=overlaps_io,
        weight_location=Location(on_chip=on_chip),
    )
    report = cycles(GRAPH, placement, settings, MK2)
    made = timeline(Run(GRAPH, placement, settings, MK2))
    assert made.cycles == report.total
    assert len(made.passages) == settings.micro_batches
    for one in made.passages:
        assert 0 <= one.input < one.input_complete < one.output < one.output_complete
    outputs = [one.output for one in made.passages]
    assert outputs == sorted(outputs)
    assert made.passages[-1].output_complete <= report.seconds


def test_stages_make_a_micro_batch_wait():
    """Each stage of a pipeline adds a cycle, which lasts as long as the slowest stage."""
    graph = resnet([3, 4, 6, 3], 64, 16)
    settings = Settings(is_training=False, device_iterations=8)
    one, two = (
        timeline(Run(graph, Placement.cut(graph, before), settings, MK2)).passages[3]
        for before in ([], ["layer3.0"])
    )
    assert two.output - two.input < 2 * (one.output - one.input)
    assert two.output < one.output


def test_the_first_output_is_the_first_forward():
    settings = Settings(is_training=False)
    placement = Placement.cut(GRAPH)
    (stage,) = cycles(GRAPH, placement, settings, MK2).stages
    (passage,) = timeline(Run(GRAPH, placement, settings, MK2)).passages
    assert passage.input == 0
    assert passage.input_complete * MK2.clock == pytest.approx(stage.receive)
    assert passage.output * MK2.clock == pytest.approx(stage.receive + stage.forward)


@pytest.mark.parametrize("is_training", [False, True])
def test_weights_in_streaming_memory_are_loaded_before_the_output(is_training):
    settings = Settings(is_training=is_training, weight_location=Location(on_chip=False))
    run = Run(GRAPH, Placement.cut(GRAPH), settings, MK2)
    (stage,) = cycles(GRAPH, run.placement, settings, MK2).stages
    assert stage.offload > stage.forward
    (passage,) = timeline(run).passages
    computing = (passage.output - passage.input_complete) * MK2.clock
    assert computing == pytest.approx(stage.offload + stage.forward)
    names = [piece.name for piece in pieces_of(run)]
    assert names[:3] == ["transfer", "load", "forward"]


def test_overlapped_inputs_arrive_while_the_micro_batch_before_is_computed():
    options = {"is_training": False, "device_iterations": 4, "io_tiles": 32}
    # In this model, the computation takes longer than the transfer of the inputs.
    graph = mlp([2048] * 9, 64)
    placement = Placement.cut(graph)
    apart, beside = (
        Run(graph, placement, Settings(**options, overlaps_io=overlaps), MK2)
        for overlaps in (False, True)
    )
    passages = timeline(beside).passages
    for before, after in pairwise(passages):
        assert before.input <= after.input < after.input_complete <= before.output
    assert passages[-1].output < timeline(apart).passages[-1].output
    assert {piece.name for piece in pieces_of(beside)} == {"forward"}
