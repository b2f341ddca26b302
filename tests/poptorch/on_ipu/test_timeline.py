"""When micro-batches come and go: in order, within the call, and as the schedule has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ipu_graphs import mlp, resnet

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.what_if import Run
from popdist_py.poptorch.on_ipu.call_times import timeline

GRAPH = mlp([512] * 5, 64)


@given(
    stages=st.integers(1, 4),
    is_training=st.booleans(),
    window=st.integers(1, 9),
    device_iterations=st.integers(1, 3),
    strategy=st.sampled_from(
        ["grouped", "interleaved", "sequential", "sharded", "serial phased", "parallel phased"]
    ),
)
def test_every_micro_batch_passes_once_and_in_order(
    stages, is_training, window, device_iterations, strategy
):
    placement = Placement.cut(GRAPH, [f"layers.{n}" for n in range(1, stages)])
    settings = Settings(
        is_training=is_training,
        accumulation=window if is_training else 1,
        device_iterations=device_iterations,
        strategy=strategy,
        output_mode="all",
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
    """Each stage of a pipeline adds a cycle, which lasts as long as the slowest one."""
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
