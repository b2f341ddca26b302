"""States of an instance, with the speed of its last steps and the shares of its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.watch.instance_state import (
    InstanceState,
    median,
    percentile,
)
from poprun_py.running.watch.phases import ACTIVITIES

MS = 1_000_000


def message(*, at=10_000, steps=(), own=None, samples=0, calls=0, step=0, lasting=0, **spent):
    """Return a wrapper's message; times in milliseconds."""
    activity = next(reversed(spent), "other")
    return {
        "progress": [step, calls, 0, 0],
        "cpu_seconds": 4.0,
        "memory_bytes": 1 << 20,
        "cpus": [0, 1],
        "started": 1_000 * MS,
        "now": at * MS,
        "ledger": {
            "now": at * MS,
            "began": 1_000 * MS,
            "activity": ACTIVITIES.index(activity),
            "since": (at - lasting) * MS,
            "nanoseconds": [spent.get(name, 0) * MS for name in ACTIVITIES],
            "samples": samples,
            "timed": len(steps),
            "steps": [each * MS for each in steps],
            "own": [each * MS for each in own or steps],
        },
    }


def test_activities_have_the_names_of_the_library():
    from popdist_py import activities

    assert ACTIVITIES == activities.NAMES


def test_resource_use_is_known_for_a_program_that_does_not_count_steps():
    said = {**message(at=3_000), "progress": None, "ledger": None}
    state = InstanceState(index=0).after(None, said)
    assert (state.phase, state.step, state.shares) == ("running", None, (0.0,) * len(ACTIVITIES))
    assert (state.cpu, state.memory_bytes) == (pytest.approx(2), 1 << 20)
    counting = InstanceState(index=0).after(said, message(computing=500))
    assert counting.share("computing") > 0


def test_cpu_time_before_counting_began_is_included():
    said = message(at=10_000, computing=1_000)
    said["ledger"]["began"] = 9_000 * MS
    assert InstanceState(index=0).after(None, said).cpu == pytest.approx(4 / 9)


def test_throttling_before_the_program_started_is_excluded():
    first = {**message(at=9_000), "throttled_seconds": 3600.0}
    then = {**message(at=10_000), "throttled_seconds": 3600.5}
    assert InstanceState(index=0).after(None, first).throttled == 0
    assert InstanceState(index=0).after(first, then).throttled == pytest.approx(0.5)


def test_shares_from_one_message_cover_all_the_time():
    said = message(computing=6_000, waiting=3_000)
    state = InstanceState(index=1).after(None, said)
    assert state.share("computing") == pytest.approx(2 / 3)
    assert state.share("computing", "waiting") == pytest.approx(1)
    assert state.cpu == pytest.approx(4 / 9)


def test_shares_from_two_messages_cover_the_time_between():
    before = message(at=8_000, computing=6_000, waiting=1_000)
    now = message(at=10_000, computing=6_500, waiting=2_500)
    state = InstanceState(index=1).after(before, now)
    assert state.share("computing") == pytest.approx(0.25)
    assert state.share("waiting") == pytest.approx(0.75)


def test_speed_is_that_of_the_last_steps():
    said = message(steps=[10] * 18 + [30, 50], own=[1] * 4 + [7] * 6, samples=21 * 8)
    state = InstanceState(index=0).after(None, said)
    assert state.step_seconds == pytest.approx(0.010)
    assert state.p95_seconds == pytest.approx(0.030)
    assert state.own_seconds == pytest.approx(0.007)
    assert state.samples_per_second == pytest.approx(8 / 0.013)


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        (message(other=1), "starting"),
        (message(steps=[5], computing=1), "training"),
        (message(compiling=1), "compiling"),
        (message(steps=[5], saving=1), "saving"),
        (message(steps=[5], validating=1), "validating"),
        (message(steps=[5], calls=2, loading=1), "validating"),
        # Steps with collectives include short waits.
        (message(steps=[5], waiting=1, lasting=20), "training"),
        (message(steps=[5], waiting=1, lasting=1_200), "waiting"),
        (message(steps=[5], loading=1, lasting=1_200), "loading"),
    ],
)
def test_the_phase_is_the_current_activity(said, phase):
    assert InstanceState(index=0).after(None, said).phase == phase


def test_a_state_survives_json():
    said = message(steps=[10] * 5, samples=48, step=6, computing=500)
    state = InstanceState(index=3, host="a", pid=7).after(None, said)
    assert InstanceState.from_json(state.to_json()).to_json() == state.to_json()


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_not_exceeded_by_that_part_of_all(values, part):
    found = percentile(values, part)
    assert found in values
    assert sum(value <= found for value in values) >= part * len(values) - 1e-9
    assert sum(value < found for value in values) < part * len(values) + 1e-9


def test_the_median_is_the_lower_one():
    assert (median([]), median([3, 1]), median([3, 1, 2])) == (0.0, 1, 2)
