"""Rounds of the observer, and the stragglers, views and records that follow from them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest

from poprun_py.running.watch.job_observer import JobObserver, RoundTimes
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.records import Recorders


class RecordingRecorder:
    """A recorder that keeps everything in lists."""

    def __init__(self):
        self.taken, self.views = [], []

    def steps(self, records):
        self.taken += records

    def view(self, view, at):
        self.views.append((at, view))


@pytest.fixture
def job():
    """A job of three instances, with lists of all calls that its observer makes."""
    return new_job(RoundTimes(between=2.0, first=2.0))


def new_job(times):
    said = SimpleNamespace(asked=[], told=[], shown=[], warned=[], recorder=RecordingRecorder())
    said.observer = JobObserver(
        job=JobView(run_id="r", pid=1, program="train.py"),
        began=0.0,
        times=times,
        ask=said.asked.append,
        tell=said.told.append,
        show=lambda *shown: said.shown.append(shown[0]),
        recorders=Recorders([said.recorder], said.warned.append),
        epoch=lambda: 1000.0,
    )
    for index in range(3):
        said.observer.started(index, "a", 100 + index, 0.0)
    return said


def message(at, steps, *, own=10, step=20, name="computing", rest=0):
    """Return the message of an instance after a number of steps.

    Args:
        at: The time in seconds.
        steps: The number of steps.
        own: Milliseconds of a step without waiting for others.
        step: Milliseconds of a step.
        name: The activity in these steps, apart from waiting.
        rest: Milliseconds outside of steps.
    """
    spent = {"waiting": steps * (step - own), name: steps * own, "other": rest}
    ns = 1_000_000
    last = min(steps, 255)
    return {
        "progress": [steps, 0, 0, 0],
        "memory_bytes": 1,
        "started": 0,
        "now": int(at * 1e9),
        "ledger": {
            "now": int(at * 1e9),
            "began": 0,
            "activity": 0,
            "since": int(at * 1e9),
            "nanoseconds": [spent.get(each, 0) * ns for each in ACTIVITIES],
            "samples": steps,
            "timed": steps,
            "steps": [step * ns] * last,
            "own": [own * ns] * last,
        },
    }


def play_round(job, at, *, slow=None, steps=None, **of_slow):
    """Start a round and answer for all instances; ``of_slow`` is about the instance ``slow``."""
    job.observer.on_time(at)
    for index in range(3):
        how = of_slow if index == slow else {}
        job.observer.observed(index, message(at, steps or int(at * 50), **how), at)


def test_instances_are_asked_in_each_round_unless_they_still_owe_an_answer(job):
    job.observer.on_time(1.9)
    assert job.asked == []
    job.observer.on_time(2.0)
    assert sorted(job.asked) == [0, 1, 2]
    job.observer.observed(0, message(2.1, 50), 2.1)
    job.observer.on_time(4.1)  # ends the round without the answers of the other two
    assert job.asked[3:] == [0]
    job.observer.observed(1, message(4.2, 50), 4.2)
    job.observer.on_time(6.2)
    assert job.asked[4:] == [1]
    assert len(job.shown) == 2


def test_a_straggler_is_reported_once_after_two_rounds(job):
    play_round(job, 2.0, slow=1, own=18)
    assert job.told == []
    for at in (4.0, 6.0, 8.0):
        play_round(job, at, slow=1, own=18)
    assert [(each.instance, each.cause) for each in job.told] == [(1, "it computes longer")]


def test_another_cause_is_reported_as_well(job):
    for at in (2.0, 4.0):
        play_round(job, at, slow=1, own=18)
    for at in (6.0, 8.0):
        # Since the last round it has been loading, so its computing time stands still.
        job.observer.on_time(at)
        for index in range(3):
            said = message(at, int(at * 50), own=18 if index == 1 else 10)
            if index == 1:
                counts = said["ledger"]["nanoseconds"]
                computed = int(4.0 * 50) * 18 * 1_000_000
                counts[ACTIVITIES.index("loading")] = counts[2] - computed
                counts[2] = computed
            job.observer.observed(index, said, at)
    assert [each.cause for each in job.told] == ["it computes longer", "it loads data longer"]


def test_one_slow_round_is_not_reported(job):
    play_round(job, 2.0)
    play_round(job, 4.0, slow=1, own=18)
    play_round(job, 6.0)
    play_round(job, 8.0, slow=1, own=18)
    assert job.told == []


def test_stragglers_are_not_searched_without_new_steps(job):
    """While an instance validates or saves, its old steps give no new information."""
    play_round(job, 2.0, slow=1, own=18)
    play_round(job, 4.0, slow=1, own=18, steps=100)
    assert job.told == []


def test_a_requested_view_comes_after_all_answers(job):
    views = []
    job.observer.request(views.append, 1.0)
    for index in (0, 1):
        job.observer.observed(index, message(1.0, 50), 1.0)
    assert views == []
    job.observer.ended(2, {**message(1.0, 50), "memory_bytes": 0}, 1.1)
    (view,) = views
    assert [each.phase for each in view.instances] == ["training", "training", "ended"]
    assert view.samples_per_second == pytest.approx(3 * 50 / 51 / 0.020)


def test_a_requested_view_does_not_wait_for_late_answers(job):
    views = []
    job.observer.request(views.append, 1.0)
    assert job.observer.next_deadline() == 2.0
    job.observer.on_time(3.1)
    assert [each.phase for each in views[0].instances] == ["running"] * 3


def test_a_view_of_an_ended_job_needs_no_round(job):
    for index in range(3):
        job.observer.ended(index, {"ledger": None}, 1.0)
    assert job.observer.next_deadline() == float("inf")
    views = []
    job.observer.request(views.append, 1.0)
    assert [each.phase for each in views[0].instances] == ["ended"] * 3
    assert job.asked == []


def test_the_slowest_instance_of_an_ended_job_is_the_reported_straggler(job):
    for at in (2.0, 4.0):
        play_round(job, at, slow=1, own=18)
    for index in range(3):
        job.observer.ended(index, {"ledger": message(6.0, 300)["ledger"]}, 6.0)
    assert job.observer.view(6.0).worst == job.told[0]


def test_the_reported_cause_stays_when_the_program_ends(job):
    """The last round includes the time after the last step."""
    for at, steps, rest in ((2.0, 100, 0), (4.0, 200, 0), (6.0, 280, 400)):
        job.observer.on_time(at)
        for index, own in enumerate((10, 18, 10)):
            job.observer.observed(index, message(at, steps, own=own, rest=rest), at)
    assert job.told[0].detail == "90% of its time"
    for index in range(3):
        job.observer.ended(index, {"ledger": None}, 7.0)
    assert job.observer.view(7.0).worst == job.told[0]


def test_only_instances_slower_than_the_median_are_reported(job):
    for at in (2.0, 4.0):
        job.observer.on_time(at)
        for index, own in enumerate((10, 14, 18)):
            job.observer.observed(index, message(at, int(at * 50), own=own), at)
    # Instance 1 has the median of the three, and only instance 2 is clearly slower.
    assert [each.instance for each in job.told] == [2]
    for index in range(3):
        job.observer.ended(index, {"ledger": None}, 6.0)
    assert job.observer.view(6.0).worst == job.told[0]


def with_steps(said, *ends, first=1, lost=0):
    """Return a message with steps that ended at these times."""
    ns = 1_000_000_000
    rows = [[first + n, int(end * ns), ns // 50, ns // 100, 4, 0.5] for n, end in enumerate(ends)]
    return {**said, "steps": {"made": 0, "lost": lost, "rows": rows}}


def test_steps_and_views_are_recorded_until_the_end(job):
    job.observer.on_time(2.0)
    for index in range(3):
        job.observer.observed(index, with_steps(message(2.0, 2), 1.5, 1.9), 2.0)
    job.observer.ended(1, with_steps(message(2.5, 3), 2.25, first=3), 2.5)
    for index in (0, 2):
        job.observer.ended(index, {}, 3.0)  # its wrapper was lost
    view = job.observer.finish(3.5)
    assert [(each.instance, each.step, each.at) for each in job.recorder.taken] == [
        *[(0, 1, 1001.5), (0, 2, 1001.9), (1, 1, 1001.5), (1, 2, 1001.9)],
        *[(2, 1, 1001.5), (2, 2, 1001.9), (1, 3, 1002.25)],
    ]
    step = job.recorder.taken[0]
    assert (step.seconds, step.own_seconds, step.samples, step.loss) == (0.02, 0.01, 4, 0.5)
    assert [at for at, _ in job.recorder.views] == [1002.0, 1003.5]
    assert job.recorder.views[-1][1] is view
    assert [each.phase for each in view.instances] == ["ended"] * 3


def test_the_rows_of_recorded_steps_are_not_kept(job):
    class Rows(list):
        """A list that a weak reference can watch."""

    said = with_steps(message(2.0, 2), 1.5, 1.9)
    said["steps"]["rows"] = Rows(said["steps"]["rows"])
    rows = weakref.ref(said["steps"]["rows"])
    job.observer.observed(0, said, 2.0)
    del said
    assert len(job.recorder.taken) == 2
    assert rows() is None


def test_an_end_reported_before_the_question_arrived_does_not_shift_steps(job):
    """The program ended at 0.5 s, but the launcher reads this at 2.1 s, after asking at 2.0 s."""
    job.observer.on_time(2.0)
    job.observer.ended(0, with_steps(message(0.5, 1), 0.25), 2.1)
    job.observer.observed(1, with_steps(message(2.0, 1), 0.25), 2.1)
    first, second = job.recorder.taken
    # The end may have been sent at any time before it arrived.
    assert (first.at, second.at) == pytest.approx((1001.85, 1000.35))
    job = new_job(RoundTimes(between=2.0, first=1.0))
    job.observer.on_time(1.0)
    job.observer.observed(0, with_steps(message(1.0, 1), 0.25), 1.0)
    job.observer.on_time(3.0)
    job.observer.ended(0, with_steps(message(1.5, 2), 1.25, first=2), 3.1)
    assert [each.at for each in job.recorder.taken] == pytest.approx([1000.25, 1001.25])


def test_a_job_that_never_started_is_not_recorded():
    recorder = RecordingRecorder()
    observer = JobObserver(
        job=JobView(run_id="r", pid=1, program="x"), began=0.0,
        times=RoundTimes(between=None), ask=None,
        tell=None, show=None, recorders=Recorders([recorder], None), epoch=lambda: 0.0,
    )  # fmt: skip
    observer.finish(1.0)
    assert recorder.views == []


def test_a_view_shows_the_last_loss(job):
    job.observer.on_time(2.0)
    for index in range(3):
        said = message(2.0, 2)
        said["ledger"]["loss"] = float("nan") if index else None
        job.observer.observed(index, said, 2.0)
    assert [str(each.loss) for each in job.shown[-1].instances] == ["None", "nan", "nan"]


def test_the_end_warns_of_steps_that_were_too_quick_to_record(job):
    job.observer.on_time(2.0)
    job.observer.observed(1, with_steps(message(2.0, 2), 1.5, lost=70), 2.0)
    job.observer.ended(1, with_steps(message(2.5, 3), 2.25, lost=7), 2.5)
    assert job.warned == []
    job.observer.finish(3.0)
    assert job.warned.pop() == "77 steps of instance 1 were too quick to be recorded"
    job.observer.ended(2, with_steps(message(2.5, 3), 2.25, lost=3), 2.5)
    job.observer.finish(3.0)
    assert job.warned == ["80 steps of 2 instances were too quick to be recorded"]


def test_stragglers_are_not_reported_in_the_first_seconds():
    job = new_job(RoundTimes.of(3, is_live=False, is_recorded=True))
    for at in range(1, 10):
        play_round(job, float(at), slow=1, own=18)
    assert job.told == []
    play_round(job, 10.0, slow=1, own=18)
    play_round(job, 11.0, slow=1, own=18)
    assert [each.instance for each in job.told] == [1]
    assert len(job.recorder.views) == 11


@pytest.mark.parametrize(("num_instances", "seconds"), [(1, 1.0), (3, 1.0), (4000, 8.0)])
def test_rounds_of_recorded_jobs_come_every_second_or_less_often_for_many_instances(
    num_instances, seconds
):
    assert RoundTimes.of(num_instances, is_live=False, is_recorded=True).between == seconds
    alone = RoundTimes.of(num_instances, is_live=False, is_recorded=False)
    assert alone.between == (None if num_instances == 1 else 2.0)
