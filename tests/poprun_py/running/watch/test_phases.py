"""The phases of an instance, from its launch to the end of its last step."""

from __future__ import annotations

import pytest

from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.phases import ACTIVITIES, Phases

SECOND = 1_000_000_000


def spent(**seconds):
    return [int(seconds.get(name, 0) * SECOND) for name in ACTIVITIES]


def message(**ledger):
    """Return the message of a wrapper whose program began at 100 s; it is 140 s now."""
    return {
        "started": 100 * SECOND,
        "now": 140 * SECOND,
        "ledger": {
            "now": 140 * SECOND, "began": 120 * SECOND, "activity": 0, "since": 0, "samples": 0,
            "timed": 0, "steps": [], "own": [], "joined": True,
            "nanoseconds": spent(other=13, compiling=3, computing=4),
            "until_first": [], "until_last": [], **ledger,
        },
    }  # fmt: skip


def test_other_is_divided_into_the_time_before_in_and_after_the_steps():
    first = spent(other=5, compiling=3, computing=1)
    last = spent(other=12, compiling=3, computing=4)
    phases = Phases.of(message(until_first=first, until_last=last), 0.5)
    assert (phases.launch, phases.imports, phases.program) == (0.5, 20, 40)
    assert phases.before_steps == {"other": 5, "compiling": 3, "computing": 1}
    assert phases.in_steps == {"other": 7, "computing": 3}
    assert phases.after_steps == {"other": 1}
    assert phases.has_steps


def test_all_time_of_a_program_without_steps_is_before_the_steps():
    phases = Phases.of(message(), 0.5)
    assert phases.before_steps == {"other": 13, "compiling": 3, "computing": 4}
    assert not phases.has_steps
    assert not phases.after_steps


def test_a_program_that_counts_nothing_has_only_a_duration():
    phases = Phases.of({**message(), "ledger": None}, 0.5)
    assert (phases.launch, phases.imports, phases.program) == (0.5, None, 40)


@pytest.mark.parametrize("ledger", [{}, {"until_first": spent(other=1), "joined": False}])
def test_phases_survive_json(ledger):
    phases = Phases.of(message(**ledger), 0.25)
    assert Phases.from_json(phases.to_json()) == phases


def test_a_state_has_phases_and_the_use_of_its_cpus():
    before = {**message(), "now": 130 * SECOND, "busy_seconds": 7.0, "cpu_seconds": 1.0}
    before["ledger"] = {**before["ledger"], "now": 130 * SECOND}
    state = InstanceState(index=0, launch=0.5).after(before, {**message(), "busy_seconds": 15.0})
    assert state.busy == pytest.approx(0.8)
    read = InstanceState.from_json(state.to_json())
    assert (read.busy, read.phases) == (pytest.approx(0.8), state.phases)


def test_states_of_older_launchers_have_no_phases():
    document = InstanceState(index=0).to_json()
    assert "phases" not in document
    assert "cpus_busy" not in document
    assert InstanceState.from_json(document).phases is None
