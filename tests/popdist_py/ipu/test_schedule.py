"""Schedules: whole grids, and rules for every schedule."""

from __future__ import annotations

from collections import Counter
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import idle_share, least_accumulation, schedule
from popdist_py.ipu.schedule_views import grid, svg
from popdist_py.ipu.settings import Settings, Strategy


def line(stages: int) -> Placement:
    return Placement(tuple(range(stages)), tuple(range(stages)))


STRATEGIES = ("grouped", "interleaved", "sequential", "sharded")
PHASED = ("serial phased", "parallel phased")
GRIDS = {
    "one IPU, accumulation": (line(1), {"accumulation": 3}),
    "two IPUs": (line(2), {"accumulation": 4, "recompute": "none"}),
    "three IPUs": (line(3), {"accumulation": 5, "recompute": "none"}),
    "four IPUs": (line(4), {"accumulation": 7, "recompute": "none"}),
    "recomputation": (line(3), {"accumulation": 5}),
    "replicas, two updates": (line(2), {"accumulation": 3, "replicas": 2, "device_iterations": 2}),
    "inference": (line(4), {"is_training": False, "device_iterations": 6}),
    "interleaved": (line(4), {"accumulation": 7, "strategy": "interleaved", "recompute": "none"}),
    "sequential": (line(3), {"accumulation": 2, "strategy": "sequential"}),
    "sharded": (line(3), {"accumulation": 2, "strategy": "sharded"}),
    "stages that come back": (
        Placement((0, 1, 2), (0, 1, 0)),
        {"accumulation": 5, "recompute": "none"},
    ),
    "serial phased": (Placement((0, 1, 2), (0, 0, 0)), {"strategy": "serial phased"}),
    "parallel phased": (Placement((0, 1, 2, 3), (0, 1, 0, 1)), {"strategy": "parallel phased"}),
}


def test_grids(golden):
    parts = []
    for title, (placement, settings) in GRIDS.items():
        made = schedule(placement, Settings(**settings))
        parts.append(f"{title}\n{grid(made, by='cycle')}\nin steps\n{grid(made)}\n")
    golden("grids.txt", "\n".join(parts))


@pytest.mark.parametrize("ipus", [2, 3, 4])
def test_grids_of_all_strategies(golden, ipus):
    """Return a strategy's smallest accumulation, which is 1 for phases (two for each IPU)."""
    phases = Placement(tuple(range(2 * ipus)), tuple(range(ipus)) * 2)
    parts = []
    for strategy in get_args(Strategy):
        is_phased = strategy in PHASED
        settings = Settings(
            strategy=strategy, recompute="none", accumulation=1 if is_phased else 2 * ipus - 1
        )
        made = schedule(phases if is_phased else line(ipus), settings)
        parts.append(f"{strategy}\n{grid(made)}")
    golden(f"strategies_{ipus}.txt", "\n".join(parts))


def test_popart_s_figure():
    made = schedule(line(3), Settings(accumulation=5, recompute="none"))
    assert grid(made, by="cycle") == (
        "     1  2  3  4    5    6    7  8  9  10\n"
        "IPU0 F1 F2 F3 F4   F5B1 B2   B3 B4 B5 U\n"
        "IPU1 .  F1 F2 F3B1 F4B2 F5B3 B4 B5 .  U\n"
        "IPU2 .  .  X1 X2   X3   X4   X5 .  .  U\n"
    )


@given(
    stages=st.integers(1, 5),
    accumulation=st.integers(1, 12),
    strategy=st.sampled_from(STRATEGIES),
    recompute=st.sampled_from(["default", "none", "stage"]),
    iterations=st.integers(1, 2),
    replicas=st.integers(1, 2),
)
def test_every_schedule_conserves_work(
    stages, accumulation, strategy, recompute, iterations, replicas
):
    settings = Settings(
        strategy=strategy,
        accumulation=accumulation,
        device_iterations=iterations,
        replicas=replicas,
        recompute=recompute,
    )
    made = schedule(line(stages), settings)
    again = settings.recomputing(line(stages))
    for ipu, row in enumerate(made.rows):
        # An IPU has one cell in each step, so it never performs two actions at once.
        assert [cell.step for cell in row] == list(range(1, len(made.cycles) + 1))
        done = Counter(cell.action for cell in row)
        assert done["forward"] == done["backward"] == accumulation * iterations
        assert done["recompute"] == (accumulation * iterations if ipu in again else 0)
        assert done["update"] == iterations
        assert done["exchange"] == (iterations if replicas > 1 else 0)
    check_order(made, stages)


def check_order(made, stages):
    """Passes follow those of neighbouring stages, and recomputation precedes the backward pass."""
    at = {(c.action, c.micro_batch, c.stage): c.step for row in made.rows for c in row}
    for action, number, stage in at:
        step = at[action, number, stage]
        if action == "forward" and stage:
            assert at["forward", number, stage - 1] < step
        if action == "backward":
            before = (
                ("backward", number, stage + 1)
                if stage + 1 < stages
                else ("forward", number, stage)
            )
            assert at[before] < step
            assert at.get(("recompute", number, stage), 0) < step


@given(
    phases=st.integers(1, 6),
    ipus=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    strategy=st.sampled_from(PHASED),
    recompute=st.sampled_from(["none", "stage"]),
)
def test_phases_conserve_work_and_are_loaded_first(phases, ipus, accumulation, strategy, recompute):
    ipus = min(phases, ipus)
    placement = Placement(tuple(range(phases)), tuple(phase % ipus for phase in range(phases)))
    settings = Settings(strategy=strategy, accumulation=accumulation, recompute=recompute)
    made = schedule(placement, settings)
    done = Counter((c.action, c.micro_batch, c.stage) for row in made.rows for c in row)
    for phase in range(phases):
        for number in range(1, accumulation + 1):
            assert done["forward", number, phase] == done["backward", number, phase] == 1
            assert done["recompute", number, phase] == (recompute == "stage")
    assert done["update", None, None] == ipus
    check_order(made, phases)
    for row in made.rows:
        loaded = None
        for cell in row:
            if cell.action == "exchange":
                loaded = cell.stage
            elif cell.action in ("forward", "backward", "recompute"):
                assert cell.stage == loaded


@given(
    stages=st.integers(1, 6),
    extra=st.integers(0, 9),
    strategy=st.sampled_from(STRATEGIES),
)
def test_idle_share_in_closed_form(stages, extra, strategy):
    count = least_accumulation(stages, is_training=True) + extra
    made = schedule(line(stages), Settings(accumulation=count, strategy=strategy, recompute="none"))
    assert made.idle_share == pytest.approx(idle_share(strategy, stages, count))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["grouped", "interleaved"])
def test_pipelines_are_full_with_the_smallest_accumulation(stages, strategy):
    settings = {"strategy": strategy, "recompute": "none"}
    least = least_accumulation(stages, is_training=True)
    assert least == 2 * stages - 1
    made = schedule(line(stages), Settings(accumulation=3 * stages, **settings))
    assert made.full_from == 2 * stages - 1
    # The pipeline stays full in every cycle up to the last forward pass.
    grouped = strategy == "grouped"
    until = 3 * stages if grouped else 2 * 3 * stages - 1
    assert made.full_from <= 2 * stages + 1 <= until
    busy = [
        cell.action != "idle"
        for row in made.rows
        for cell in row
        if made.full_from <= made.cycles[cell.step - 1] <= until
    ]
    assert all(busy)
    if grouped:
        assert schedule(line(stages), Settings(accumulation=least, **settings)).full_from == least
        fewer = schedule(line(stages), Settings(accumulation=least - 1, **settings))
        assert fewer.full_from is None
        again = schedule(line(stages), Settings(accumulation=least, recompute="stage"))
        assert again.full_from == least


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_where_the_tutorial_s_counts_come_out(stages):
    """The tutorial says that a pipeline is full after 2N + 1 steps, and shows nine for four IPUs.

    In steps of one pass each, the grouped pipeline is full after 3 (N - 1) steps, which are nine
    for four IPUs. In the interleaved pipeline, micro-batch 1 has passed all forward and backward
    passes after 2N steps. The first IPU begins another micro-batch in step 2N + 1.
    """
    grouped = schedule(line(stages), Settings(accumulation=3 * stages, recompute="none"))
    assert grouped.steps_until_full == 3 * (stages - 1)
    if stages == 4:
        assert grouped.steps_until_full == 9 == 2 * stages + 1
    turns = Settings(accumulation=3 * stages, recompute="none", strategy="interleaved")
    first = schedule(line(stages), turns).rows[0]
    assert (first[2 * stages - 1].action, first[2 * stages - 1].micro_batch) == ("backward", 1)
    assert (first[2 * stages].action, first[2 * stages].micro_batch) == ("forward", stages + 1)


def test_a_pipeline_with_few_micro_batches_is_never_full():
    made = schedule(line(4), Settings(accumulation=6, recompute="none"))
    assert made.full_from is None
    assert made.steps_until_full is None


def test_only_the_first_steps():
    made = schedule(line(2), Settings(accumulation=4, device_iterations=10**9), steps=5)
    assert [len(row) for row in made.rows] == [5, 5]
    assert len(made.cycles) == 5


@pytest.mark.parametrize("steps", [-1, 1.5, "all"])
def test_invalid_numbers_of_steps(steps):
    with pytest.raises(ValueError, match=f"steps={steps!r}: expected an integer of at least 0"):
        schedule(line(2), Settings(accumulation=4), steps=steps)


def test_picture(golden):
    golden("two_ipus.svg", svg(schedule(line(2), Settings(accumulation=3, replicas=2))))


def test_pictures_have_a_box_for_each_cell():
    made = schedule(line(3), Settings(accumulation=5, replicas=2))
    root = ElementTree.fromstring(svg(made))
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}g")) == 3 * len(made.cycles)
    assert root.find(f"{name}g/{name}title").text == "step 1: forward, stage 0"
