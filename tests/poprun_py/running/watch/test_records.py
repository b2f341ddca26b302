"""Times of other clocks, and recorders that fail."""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.recording import InstanceSteps, Recorders
from poprun_py.running.watch.records import StepRecord

NS = 1_000_000_000
VIEW = JobView(run_id="r", pid=1, program="x", seconds=1.0, instances=())


def told(now, *ends):
    """Return the message of a host on whose clock it is ``now``, of steps that ended then."""
    rows = [[number, int(end * NS), -1, -1, 0, None] for number, end in enumerate(ends, 1)]
    return {"ledger": {"now": int(now * NS)}, "steps": {"made": 9, "lost": 0, "rows": rows}}


def times(records):
    return [round(each.at, 6) for each in records]


def test_a_first_step_has_no_time_and_may_have_no_loss():
    (step,) = InstanceSteps(3).take(told(10.0, 9.0), 100.0, 100.0)
    assert step == StepRecord(at=99.0, instance=3, step=1, seconds=0.0, own_seconds=0.0)


def test_what_tells_no_steps_is_none():
    steps = InstanceSteps(0)
    assert steps.take({}, 1.0, 1.0) == []
    assert steps.take({"ledger": None, "steps": {"made": 0, "lost": 0, "rows": []}}, 1, 1) == []
    assert steps.take({"ledger": {"now": 1}}, 1.0, 1.0) == []


def test_an_answer_that_comes_late_moves_no_step():
    steps = InstanceSteps(0)
    assert times(steps.take(told(10.0, 9.5), 100.0, 100.002)) == [99.502]
    # The launcher was held up for a minute: the host answered at some time in between.
    assert times(steps.take(told(20.0, 19.5), 110.0, 170.0)) == [109.502]
    # The clocks go apart: the host answered after it was asked.
    assert times(steps.take(told(30.0, 29.5), 120.5, 120.6)) == [120.0]
    # The launcher's clock was set back: no step is before another.
    assert times(steps.take(told(40.0, 39.5, 39.75), 90.0, 90.1)) == [120.0, 120.0]


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 10)),
        min_size=1,
        max_size=20,
    ),
    st.floats(-1e6, 1e6),
)
def test_times_are_off_by_no_more_than_the_quickest_answer(talks, ahead):
    """Whatever late answers there are, a host whose clock keeps pace is understood."""
    steps, now, least, last = InstanceSteps(0), 1e9, float("inf"), 0.0
    for pause, there, back, late in talks:
        asked = now + pause
        read = asked + there
        now = read + back + late
        least = min(least, back + late)
        (record,) = steps.take(told(read - ahead, read - ahead - 0.1), asked, now)
        assert record.at >= last
        assert -1e-4 <= record.at - (read - 0.1) <= max(least, back + late) + 1e-4
        last = record.at


class Failing:
    def __init__(self, error):
        self.error, self.calls = error, 0

    def steps(self, records):
        self.calls += 1
        raise self.error

    def look(self, view, at):
        self.calls += 1
        raise self.error


class Taking:
    def __init__(self):
        self.got = []

    def steps(self, records):
        self.got.append(records)

    def look(self, view, at):
        self.got.append(view)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/r/attempt-1/steps.jsonl"),
            "the job goes on, but its steps are no longer recorded "
            "(runs/r/attempt-1/steps.jsonl: No space left on device)",
        ),
        (
            KeyError("x"),
            "the job goes on, but its steps are no longer recorded (Failing: KeyError('x'))",
        ),
    ],
)
def test_a_recorder_that_fails_is_told_of_once_and_left_out(error, said):
    warned, failing, taking = [], Failing(error), Taking()
    recorders = Recorders([failing, taking], warned.append)
    record = StepRecord(at=1.0, instance=0, step=1, seconds=0.1, own_seconds=0.1)
    for _ in range(3):
        recorders.steps([record])
        recorders.look(VIEW, 1.0)
    recorders.steps([])
    assert warned == [said]
    assert failing.calls == 1
    assert taking.got == list(itertools.chain(*[([record], VIEW)] * 3))
