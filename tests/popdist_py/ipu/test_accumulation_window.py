"""The times between two weight updates: activities, busy times and pipeline cycles agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.settings import Location, Settings
from popdist_py.ipu.specification import MK2
from tools.device.ipu_graphs import mlp

GRAPH = mlp([512] * 5, 64)
CUT = Placement.cut(GRAPH, ["layers.1", "layers.2", "layers.3"])
# Placements of four stages on four, three and two IPUs. IPU 1 of the second placement is unused.
PLACEMENTS = [CUT, Placement(CUT.stages, (0, 2, 0, 3)), Placement(CUT.stages, (0, 1, 1, 0))]
STRATEGIES = ["grouped", "interleaved", "sequential", "serial phased", "parallel phased"]


@given(
    placement=st.sampled_from(PLACEMENTS),
    strategy=st.sampled_from(STRATEGIES),
    accumulation=st.integers(1, 9),
    overlaps_io=st.booleans(),
    on_chip=st.booleans(),
)
def test_busy_times_are_the_lengths_of_the_pieces(
    placement, strategy, accumulation, overlaps_io, on_chip
):
    settings = Settings(
        strategy=strategy,
        accumulation=accumulation,
        replicas=2,
        io_tiles=32 * overlaps_io,
        overlaps_io=overlaps_io,
        weight_location=Location(on_chip=on_chip),
    )
    report, window = cycles_and_window(GRAPH, placement, settings, MK2)
    found = [0.0] * placement.num_ipus
    pieces = window.pieces()
    for piece in pieces:
        # Exchanges between replicas, and loads of phases before they run, are not computation.
        if piece.name != "reduce" and not (settings.is_phased and piece.name == "load"):
            found[piece.ipu] += (piece.end - piece.begin) / window.scale
    assert found == pytest.approx(window.busy)
    assert report.window == window.cycles
    assert window.scale >= 1 - 1e-6
    assert report.busy == pytest.approx([one / report.total for one in window.busy])


def test_a_forward_pass_begins_after_its_pipeline_cycle_begins():
    settings = Settings(accumulation=7)
    _, window = cycles_and_window(GRAPH, CUT, settings, MK2)
    for stage in range(4):
        begin = window.forward_begins(stage)
        begins = {number: begin(number) for number in range(1, 8)}
        pieces = [p for p in window.pieces() if (p.name, p.stage) == ("forward", stage)]
        assert all(begins[piece.micro_batch] <= piece.begin for piece in pieces)
        # Another stage runs the same micro-batch one pipeline cycle later.
        if stage:
            before = window.forward_begins(stage - 1)
            assert all(before(number) < begins[number] for number in begins)
