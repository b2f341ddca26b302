"""Step records made from messages of hosts with other clocks, and recorders that fail."""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import Recorders, StepReader, StepRecord

NS = 1_000_000_000
VIEW = JobView(run_id="r", pid=1, program="x", seconds=1.0, instances=())


def message(now, *ends):
    """Return a message sent at ``now`` on the host's clock, with steps that ended at ``ends``."""
    rows = [[number, int(end * NS), -1, -1, 0, None] for number, end in enumerate(ends, 1)]
    return {"ledger": {"now": int(now * NS)}, "steps": {"made": 9, "lost": 0, "rows": rows}}


def times(records):
    return [round(each.at, 6) for each in records]


def test_a_first_step_has_no_duration_and_may_have_no_loss():
    (step,) = StepReader(3).read(message(10.0, 9.0), 100.0, 100.0)
    assert step == StepRecord(at=99.0, instance=3, step=1, seconds=0.0, own_seconds=0.0)


def test_a_message_without_steps_gives_no_records():
    steps = StepReader(0)
    assert steps.read({}, 1.0, 1.0) == []
    assert steps.read({"ledger": None, "steps": {"made": 0, "lost": 0, "rows": []}}, 1, 1) == []
    assert steps.read({"ledger": {"now": 1}}, 1.0, 1.0) == []


def test_a_late_answer_does_not_shift_steps():
    steps = StepReader(0)
    assert times(steps.read(message(10.0, 9.5), 100.0, 100.002)) == [99.502]
    # The launcher was busy for a minute, and the host answered at some time in that minute.
    assert times(steps.read(message(20.0, 19.5), 110.0, 170.0)) == [109.502]
    # The clocks have drifted apart, because the host cannot answer before it was asked.
    assert times(steps.read(message(30.0, 29.5), 120.5, 120.6)) == [120.0]
    # The launcher's clock was set back, but the steps stay in order.
    assert times(steps.read(message(40.0, 39.5, 39.75), 90.0, 90.1)) == [120.0, 120.0]


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 10)),
        min_size=1,
        max_size=20,
    ),
    st.floats(-1e6, 1e6),
)
def test_times_are_wrong_by_at_most_the_delay_of_the_quickest_answer(talks, ahead):
    """Late answers do no harm if the host's clock runs at the launcher's rate."""
    steps, now, least, last = StepReader(0), 1e9, float("inf"), 0.0
    for pause, there, back, late in talks:
        asked = now + pause
        read = asked + there
        now = read + back + late
        least = min(least, back + late)
        (record,) = steps.read(message(read - ahead, read - ahead - 0.1), asked, now)
        assert record.at >= last
        assert -1e-4 <= record.at - (read - 0.1) <= max(least, back + late) + 1e-4
        last = record.at


class Failing:
    def __init__(self, error):
        self.error, self.calls = error, 0

    def steps(self, records):
        self.calls += 1
        raise self.error

    def view(self, view, at):
        self.calls += 1
        raise self.error


class Taking:
    def __init__(self):
        self.got = []

    def steps(self, records):
        self.got.append(records)

    def view(self, view, at):
        self.got.append(view)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/r/attempt-1/steps.jsonl"),
            "the job continues, but its steps are no longer recorded "
            "(runs/r/attempt-1/steps.jsonl: No space left on device)",
        ),
        (
            KeyError("x"),
            "the job continues, but its steps are no longer recorded (Failing: KeyError('x'))",
        ),
    ],
)
def test_a_failing_recorder_is_reported_once_and_then_left_out(error, said):
    warned, failing, taking = [], Failing(error), Taking()
    recorders = Recorders([failing, taking], warned.append)
    record = StepRecord(at=1.0, instance=0, step=1, seconds=0.1, own_seconds=0.1)
    for _ in range(3):
        recorders.steps([record])
        recorders.view(VIEW, 1.0)
    recorders.steps([])
    assert warned == [said]
    assert failing.calls == 1
    assert taking.got == list(itertools.chain(*[([record], VIEW)] * 3))
