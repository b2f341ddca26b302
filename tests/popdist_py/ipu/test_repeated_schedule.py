"""Schedules that consist of repetitions agree with schedules that are computed cell by cell."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cell_by_cell import Cells, Times
from support.cpu_time import limited_cpu_time

from popdist_py.ipu.accumulation_window import lay_out, window_length
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.repeated_schedule import repeated_schedule
from popdist_py.ipu.reports import execution_page, memory_page
from popdist_py.ipu.runs.device_document import model_document
from popdist_py.ipu.runs.micro_batch_times import timeline
from popdist_py.ipu.runs.timeline_rows import MOST_PIECES, call_pieces
from popdist_py.ipu.schedule import Schedule, schedule, window_idle_share
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings, Strategy
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.stage_cycles import CYCLE_MODEL, StageCycles
from tools.device.ipu_graphs import mlp

BILLION = 10**9
STRATEGIES = get_args(Strategy)
# Stages that follow one another on different IPUs, and stages that come back to an earlier IPU.
PLACEMENTS = st.integers(1, 6).flatmap(
    lambda stages: st.one_of(
        st.just(tuple(range(stages))),
        st.lists(st.integers(0, 3), min_size=stages, max_size=stages).map(tuple),
    ).map(lambda ipus: Placement(tuple(range(stages)), ipus))
)


def settings_of(strategy: Strategy) -> st.SearchStrategy[Settings]:
    return st.builds(
        lambda is_training, count, iterations, overlaps_io, **others: Settings(
            is_training=is_training,
            accumulation=count if is_training else 1,
            device_iterations=iterations if is_training else count,
            io_tiles=32 * overlaps_io,
            overlaps_io=overlaps_io,
            strategy=strategy,
            **others,
        ),
        st.booleans(),
        st.integers(1, 17),
        st.integers(1, 3),
        st.booleans(),
        replicas=st.integers(1, 2),
        recompute=st.sampled_from(["default", "none", "stage"]),
        recomputes_last=st.booleans(),
    )


# Cycles of stages, where some stages have no work in a pass.
WORK = st.sampled_from([0.0, 1.0, 1e3]) | st.floats(1, 1e9)
STAGES = st.lists(st.builds(StageCycles, *[WORK] * 9), min_size=6, max_size=6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data(), placement=PLACEMENTS, steps=st.none() | st.integers(0, 40))
def test_a_schedule_has_the_cells_of_a_computation_cell_by_cell(strategy, data, placement, steps):
    settings = data.draw(settings_of(strategy))
    expected = Cells(placement, settings)
    made = schedule(placement, settings, steps=steps)
    assert made.cycles == tuple(expected.cycles[:steps])
    assert [[(c.action, c.micro_batch, c.stage) for c in row] for row in made.rows] == [
        row[:steps] for row in expected.rows
    ]
    for row in made.rows:
        assert [cell.step for cell in row] == list(range(1, len(made.cycles) + 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data(), placement=PLACEMENTS)
def test_the_idle_share_of_a_window_is_that_of_its_cells(strategy, data, placement):
    settings = data.draw(settings_of(strategy))
    made = schedule(placement, settings.one_window)
    assert window_idle_share(placement, settings) == made.idle_share


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data(), placement=PLACEMENTS, stages=STAGES)
def test_a_window_has_the_times_of_a_computation_cell_by_cell(strategy, data, placement, stages):
    settings = data.draw(settings_of(strategy))
    stages = stages[: placement.num_stages]
    expected = Times(stages, placement, settings, CYCLE_MODEL)
    made = lay_out(stages, placement, settings, CYCLE_MODEL)
    assert made.length == pytest.approx(expected.length, rel=1e-12)
    assert window_length(stages, placement, settings, CYCLE_MODEL) == made.length
    assert made.busy == pytest.approx(expected.busy, rel=1e-12)
    near = {"rel": 1e-9, "abs": 1e-9 * made.length}
    for stage in range(placement.num_stages):
        begin = made.forward_begins(stage)
        begins = expected.forward_begins(stage)
        assert [begin(number) for number in begins] == pytest.approx([*begins.values()], **near)
    pieces, others = made.pieces(), expected.pieces()
    assert made.num_pieces == len(pieces) == len(others)
    for one, other in zip(pieces, others, strict=True):
        about = one.ipu, one.name, one.micro_batch, one.stage
        assert about == (other.ipu, other.name, other.micro_batch, other.stage)
        assert (one.begin, one.end) == pytest.approx((other.begin, other.end), **near)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data(), placement=PLACEMENTS, stages=STAGES)
def test_the_outermost_pieces_have_the_ends_of_each_ipu(strategy, data, placement, stages):
    settings = data.draw(settings_of(strategy))
    made = lay_out(stages[: placement.num_stages], placement, settings, CYCLE_MODEL)
    pieces, outermost = made.pieces(), made.outermost_pieces()
    assert set(outermost) <= set(pieces)
    for ipu in range(placement.num_ipus):
        own = [piece for piece in pieces if piece.ipu == ipu]
        some = [piece for piece in outermost if piece.ipu == ipu]
        assert (own[:1], own[-1:]) == (some[:1], some[-1:])
        assert {piece.stage for piece in own} == {piece.stage for piece in some}


def run_of(strategy, *, is_training, layers=64, ipus=64, **settings) -> Run:
    graph = mlp([64] * (layers + 1), 4)
    starts = range(layers // ipus, layers, layers // ipus)[: ipus - 1]
    placement = Placement.cut(graph, [f"layers.{number}" for number in starts])
    counts = {"accumulation": BILLION, "device_iterations": BILLION}
    if not is_training:
        counts["accumulation"] = 1
    options = {**counts, "strategy": strategy, "is_training": is_training, **settings}
    return Run(graph, placement, Settings(**options), MK2)


FEW_RUNS = {("grouped", True), ("interleaved", False), ("serial phased", True)}


@pytest.mark.parametrize(
    ("strategy", "is_training"),
    [
        pytest.param(*each, marks=() if each in FEW_RUNS else pytest.mark.sweep)
        for each in product(STRATEGIES, (False, True))
    ],
)
def test_a_billion_micro_batches_cost_no_more_than_a_few(strategy, is_training):
    overlaps_io = not is_training
    run = run_of(
        strategy,
        is_training=is_training,
        overlaps_io=overlaps_io,
        io_tiles=32 * overlaps_io,
        replicas=2,
    )
    # tracemalloc makes Python about four times slower.
    with limited_cpu_time(4 * 5):
        tracemalloc.start()
        execution, memory = execution_page(run), memory_page(run)
        assert str(execution)
        assert execution.to_json()
        assert memory.to_json()
        assert model_document(run, "Model", is_named=True)["schedule"]["is_whole"] is False
        passages = timeline(run).passages
        assert 0 < passages[0].output < passages[len(passages) // 2].output < passages[-1].output
        assert passages[-1].output_complete <= 1.001 * execution.report.seconds
        made = lay_out(execution.report.stages, run.placement, run.settings, run.model)
        assert len(call_pieces(made)) <= MOST_PIECES
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 200e6


@pytest.mark.sweep
def test_many_operations_on_many_ipus_take_few_seconds():
    run = run_of("grouped", is_training=True, layers=5000, replicas=2)
    assert len(run.graph.operations) > 9000
    with limited_cpu_time(10):
        assert str(execution_page(run))
        assert str(memory_page(run))
        assert model_document(run, "Model", is_named=True)["stages"] == 64


def test_the_length_of_a_window_is_fast_enough_for_searches():
    stages = [StageCycles(*range(1, 10))] * 8
    placement = Placement(tuple(range(8)), tuple(range(8)))
    settings = Settings(accumulation=BILLION)
    window_length(stages, placement, settings, CYCLE_MODEL)
    with limited_cpu_time(100 * 1e-3):
        for _ in range(100):
            window_length(stages, placement, settings, CYCLE_MODEL)


def test_a_schedule_between_updates_is_made_once_for_equal_options():
    first = repeated_schedule(Placement((0, 0, 1), (0, 1)), Settings(accumulation=9))
    assert repeated_schedule(Placement((0, 1, 1), (0, 1)), Settings(accumulation=9)) is first
    assert len(first.repetitions) < 10
    assert isinstance(schedule(Placement((0, 1), (0, 1)), Settings()), Schedule)
