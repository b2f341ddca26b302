"""Emulated IPUs as rows of the timeline: spans inside the call, in the order of the schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.cycles import cycles, cycles_and_window
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.runs.timeline_rows import MOST_PIECES, call_pieces
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp

GRAPH = mlp([512] * 5, 64)
RUNS = st.builds(
    lambda stages, is_training, count, iterations, strategy, replicas: Run(
        GRAPH,
        Placement.cut(GRAPH, [f"layers.{n}" for n in range(1, stages)]),
        Settings(
            is_training=is_training,
            accumulation=count if is_training else 1,
            device_iterations=iterations,
            strategy=strategy,
            replicas=replicas,
        ),
        MK2,
    ),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 80),
    st.integers(1, 60),
    st.sampled_from(
        ["grouped", "interleaved", "sequential", "sharded", "serial phased", "parallel phased"]
    ),
    st.sampled_from([1, 2]),
)


def window(run):
    return cycles_and_window(run.graph, run.placement, run.settings, run.ipu)[1]


def pipeline(**settings) -> Run:
    placement = Placement.cut(GRAPH, ["layers.2"])
    return Run(GRAPH, placement, Settings(**{"accumulation": 4, **settings}), MK2)


@given(run=RUNS)
def test_a_window_has_the_cells_of_its_schedule_in_order(run):
    one = replace(run.settings, device_iterations=1) if run.settings.is_training else run.settings
    made = window(run)
    names = {"exchange": ("load", "reduce"), "forward": ("forward",), "update": ("update",)}
    for ipu, row in enumerate(schedule(run.placement, one).rows):
        own = [piece for piece in made.pieces() if piece.ipu == ipu]
        for before, after in pairwise(own):
            assert before.begin <= before.end <= after.begin <= after.end <= made.cycles
        cells = [c for c in row if c.action in ("forward", "recompute", "backward", "update")]
        shown = [piece for piece in own if piece.name not in ("transfer", "load", "reduce")]
        assert [(piece.name, piece.micro_batch, piece.stage) for piece in shown] == [
            (names.get(cell.action, (cell.action,))[0], cell.micro_batch, cell.stage)
            for cell in cells
        ]


@given(run=RUNS)
def test_a_call_is_drawn_with_a_bounded_number_of_pieces(run):
    pieces = call_pieces(window(run))
    rows = defaultdict(list)
    for piece in pieces:
        rows[piece.row].append(piece)
    assert len(pieces) <= MOST_PIECES or len(pieces) == len(rows)
    assert set(rows) == {f"IPU {ipu}" for ipu in set(run.placement.ipus)}
    for row in rows.values():
        assert row[0].begin >= 0
        for before, after in pairwise(row):
            assert before.begin <= before.end <= after.begin <= after.end
        assert row[-1].end <= 1


def test_a_pipeline_is_drawn_cell_by_cell():
    """The second stage's forward pass begins when the first stage's forward pass has ended."""
    pieces = call_pieces(window(pipeline()))
    by_key = {(p.row, p.name, p.arguments): p for p in pieces}
    for number in range(1, 5):
        about = [f'{{"micro-batch": {number}, "stage": {stage}}}' for stage in (0, 1)]
        first = by_key["IPU 0", "forward", about[0]]
        second = by_key["IPU 1", "forward", about[1]]
        back = by_key["IPU 1", "backward", about[1]]
        last = by_key["IPU 0", "backward", about[0]]
        ends = [first.begin, first.end, second.begin, second.end, back.begin, back.end, last.begin]
        assert ends == sorted(ends)
    updates = [piece for piece in pieces if piece.name == "update"]
    assert [piece.row for piece in updates] == ["IPU 0", "IPU 1"]
    assert not any(piece.name == "reduce" for piece in pieces)  # the IPUs of one replica


def test_lengths_are_the_proportions_of_the_model():
    run = pipeline()
    report = cycles(run.graph, run.placement, run.settings, run.ipu)
    own = [piece for piece in window(run).pieces() if piece.ipu == 0]
    lengths = {piece.name: piece.end - piece.begin for piece in own}
    stage = report.stages[0]
    assert lengths["backward"] / lengths["forward"] == pytest.approx(stage.backward / stage.forward)
    assert lengths["update"] / lengths["forward"] == pytest.approx(stage.update / stage.forward)


def test_many_micro_batches_are_drawn_by_stages_and_many_updates_by_ipus():
    by_stages = call_pieces(window(pipeline(accumulation=500)))
    assert [(piece.row, piece.name) for piece in by_stages] == [
        ("IPU 0", "stage 0"),
        ("IPU 0", "update"),
        ("IPU 1", "stage 1"),
        ("IPU 1", "update"),
    ]
    by_ipus = call_pieces(window(pipeline(device_iterations=500)))
    assert [(piece.row, piece.name) for piece in by_ipus] == [
        ("IPU 0", "stage 0"),
        ("IPU 1", "stage 1"),
    ]
    assert by_ipus[0].begin == 0
    assert by_ipus[1].end == pytest.approx(1, abs=0.01)
