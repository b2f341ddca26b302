"""Hang detection by the steps and the activity of instances, with a clock of the test."""

from __future__ import annotations

import pytest

from popdist_py.environment import AUTOMATIC, COMPILING, INFERENCE, TRAINING
from poprun_py.running.supervise.activity_monitor import ActivitySample as Sample
from poprun_py.running.supervise.hang_detection import HangDetector
from poprun_py.running.supervise.launch_result import Progress


def test_hang_with_a_fixed_limit():
    detector = HangDetector(2.0)
    detector.record_progress(0, Progress(0), now=0.0)
    assert detector.hung(19.0) == ()  # joining and compiling may take longer
    assert detector.hung(31.0) == (0,)
    detector.record_progress(0, Progress(1), now=20.0)
    detector.record_progress(1, Progress(1), now=21.0)
    assert detector.hung(21.9) == ()
    assert detector.hung(22.5) == (0,)
    assert detector.hung(23.5) == (0, 1)
    detector.remove(0, 23.0)
    assert detector.hung(23.5) == (1,)


def test_automatic_limit_follows_the_median_step():
    detector = HangDetector("auto")
    for step in range(20):
        detector.record_progress(0, Progress(step), now=2.0 * step)
    assert detector.limit() == pytest.approx(40.0)
    assert detector.hung(38 + 39.0) == ()
    assert detector.hung(38 + 41.0) == (0,)


def test_automatic_limit_waits_for_a_few_steps_and_has_a_floor():
    detector = HangDetector("auto")
    detector.record_progress(0, Progress(1), now=0.0)
    assert detector.limit() == float("inf")
    for step in range(2, 20):
        detector.record_progress(0, Progress(step), now=0.001 * step)
    assert detector.limit() == 10.0


def test_short_steps_that_are_seen_several_at_a_time_all_count():
    detector = HangDetector("auto")
    for now, step in ((0.0, 1), (0.2, 10), (0.4, 20)):
        detector.record_progress(0, Progress(step), now)
    assert detector.limit() == 10.0


def test_a_reset_restarts_all_times():
    detector = HangDetector(2.0)
    detector.record_progress(0, Progress(1), now=0.0)
    detector.reset_timers(now=10.0)
    assert detector.hung(11.9) == ()
    assert detector.hung(12.1) == (0,)
    assert detector.progress_counts() == {0: (1, 0)}


def test_a_job_without_instances_does_not_hang():
    assert HangDetector(0.1).hung(1e9) == ()


def test_time_in_which_the_launcher_was_stopped_or_blocked_does_not_count():
    detector = HangDetector(2.0)
    for now in (0.0, 0.5, 1.0):
        detector.record_progress(0, Progress(int(2 * now) + 1), now)
        assert detector.check(now, is_blocked=False) == ()
    assert detector.next_deadline() == 1.0 + detector.check_interval
    assert detector.check(31.0, is_blocked=False) == ()
    for quarter in range(1, 9):
        assert detector.check(31.0 + quarter / 4, is_blocked=False) == ()
    assert detector.check(33.1, is_blocked=True) == ()
    for quarter in range(1, 9):
        assert detector.check(33.1 + quarter / 4, is_blocked=False) == ()
    assert detector.check(35.2, is_blocked=False) == (0,)


def trained(detector, steps=20, seconds=2.0):
    """Let instance 0 make steps of ``seconds`` each; return the time of the last."""
    for step in range(steps + 1):
        detector.record_progress(0, Progress(step), seconds * step)
    return seconds * steps


def test_a_long_validation_after_short_steps_does_not_hang():
    detector = HangDetector("auto")
    now = trained(detector, seconds=0.1)
    assert detector.limit() == 10.0
    # The validation takes longer than any training step may.
    detector.record_progress(0, Progress(20, doing=INFERENCE), now)
    assert detector.hung(now + 300.0) == ()
    detector.record_progress(0, Progress(20, 1), now + 300.0)
    # The next training step has the limit of training steps, from its beginning.
    detector.record_progress(0, Progress(20, 1, doing=TRAINING), now + 350.0)
    assert detector.hung(now + 359.0) == ()
    assert detector.hung(now + 361.0) == (0,)
    detector.record_progress(0, Progress(21), now + 350.1)
    assert detector.limit() == 10.0  # the validation does not count as a step


def test_validation_calls_are_compared_with_one_another():
    detector = HangDetector("auto")
    now = trained(detector, seconds=0.1)
    for call in range(1, 8):
        detector.record_progress(0, Progress(20, call), now + 2.0 * call)
    assert (detector.limit(TRAINING), detector.limit(INFERENCE)) == (10.0, pytest.approx(40.0))
    assert detector.hung(now + 14.0 + 39.0) == ()
    assert detector.hung(now + 14.0 + 41.0) == (0,)
    detector.record_progress(0, Progress(21, 1), now + 15.0)  # a step and a call in one message
    detector.record_progress(0, Progress(21, 2), now + 17.0)
    assert detector.limit(INFERENCE) == pytest.approx(40.0)


def test_compiling_another_model_may_take_longer_than_a_step():
    detector = HangDetector(2.0)
    now = trained(detector)
    detector.record_progress(0, Progress(20, doing=COMPILING), now)
    assert detector.hung(now + 29.0) == ()
    assert detector.hung(now + 31.0) == (0,)
    detector.record_progress(0, Progress(20, doing=INFERENCE), now + 20.0)
    assert detector.hung(now + 21.9) == ()
    assert detector.hung(now + 22.1) == (0,)


def test_the_beginning_of_a_step_does_not_restart_the_time():
    detector = HangDetector(2.0)
    detector.record_progress(0, Progress(5), now=0.0)
    detector.record_progress(0, Progress(6), now=1.0)
    detector.record_progress(0, Progress(6, doing=TRAINING), now=2.0)
    assert detector.hung(3.1) == (0,)
    assert detector.idle_seconds(0, 3.1) == pytest.approx(2.1)


def test_the_steps_before_a_checkpoint_do_not_count_as_progress():
    detector = HangDetector("auto")
    detector.record_progress(0, Progress(1), now=0.0)
    detector.record_progress(0, Progress(1000, resumed=1000), now=0.1)
    for step in range(1001, 1006):
        detector.record_progress(0, Progress(step, resumed=1000), now=2.0 * (step - 1000))
    assert detector.limit() == float("inf")  # only four durations of steps are known
    detector.record_progress(0, Progress(1006, resumed=1000), now=12.0)
    assert detector.limit() == pytest.approx(40.0)
    # After a return to an earlier checkpoint, the limit of the start applies.
    detector.record_progress(0, Progress(900, resumed=900), now=15.0)
    assert detector.hung(15.0 + 399.0) == ()
    assert detector.hung(15.0 + 401.0) == (0,)


def test_invalid_progress_does_not_end_the_launcher():
    detector = HangDetector("auto")
    now = trained(detector)
    detector.record_progress(0, Progress(-3, -1, -7, 99), now)
    assert detector.hung(now + 1) == ()


def test_the_longest_idle_instance_comes_first():
    detector = HangDetector(1.0)
    for instance, last in ((0, 3.0), (1, 2.0), (2, 2.5)):
        detector.record_progress(instance, Progress(1), now=1.0)
        detector.record_progress(instance, Progress(2), now=last)
    assert detector.hung(3.1) == (1,)
    assert detector.hung(5.0) == (1, 2, 0)


class Job:
    """Instances that have made 20 steps of 20 ms, with a sample every second from then on.

    Each instance is a function from the time to the fields of its sample, or to None if its wrapper
    sends no sample.
    """

    def __init__(self, *instances, limit="auto", stacks=None, slow=()):
        self.detector, self.instances = HangDetector(limit), instances
        self.waiting, self.ending = stacks or ((), ())
        for index in range(len(instances)):
            self.detector.activity.add(index, 0.0)
            for step in range(21):
                self.detector.record_progress(index, Progress(step), 0.02 * step - 0.4)
        now = 0.0
        for step, pause in enumerate(slow, 21):
            now += pause
            for index in range(len(instances)):
                self.detector.record_progress(index, Progress(step), now)
        self.began = now
        self.detector.check(now, is_blocked=False)

    def hang(self, until):
        """Return the instances that hang, and the seconds until they did."""
        for second in range(1, round(until) + 1):
            now = self.began + second
            for index, sample in enumerate(self.instances):
                if (fields := sample(second)) is not None:
                    # The clock of its host differs from the launcher's.
                    self.detector.activity.record(index, Sample(at=now + 500, **fields), now)
            if self.detector.check(now, is_blocked=False):
                hung = self.detector.confirm(self.waiting, self.ending, now)
                if hung:
                    return hung, second
        return (), None


def asleep(second):
    return {}


def in_collective(second):
    """It waits in a collective of the library, and polls now and then."""
    return {"waits": True, "call": (9, 1, 1), "awake_seconds": 0.9 * second}


def stopped(second):
    return {"stopped": True}


def saving(seconds):
    return lambda second: {"saves": second <= seconds}


def computing(second):
    return {"awake_seconds": 1.0 * second}


def downloading(second):
    return {"received_bytes": 20_000 * second}


def in_one_call(second):
    return {"awake_seconds": 1.0 * second, "away": max(0.0, second - 2.0)}


@pytest.mark.parametrize("limit", ["auto", 2.0])
@pytest.mark.parametrize("work", [computing, downloading, saving(200), saving(16)])
def test_work_between_steps_and_waiting_for_it_do_not_hang(work, limit):
    until = 16 if work(16).get("saves") else 200
    assert Job(work, in_collective, limit=limit).hang(until) == ((), None)
    assert Job(work, work, limit=limit).hang(until) == ((), None)


def test_with_auto_a_program_may_sleep_for_two_minutes_after_short_steps():
    assert Job(asleep, asleep).hang(119) == ((), None)
    hung, when = Job(asleep, in_collective).hang(200)
    assert hung == (0, 1)
    assert 120 <= when <= 122
    assert Job(asleep, asleep, limit=2.0).hang(200) == ((0, 1), 3)


@pytest.mark.parametrize(("first", "second"), [(in_collective, in_collective), (stopped, stopped),
                                               (in_collective, stopped)])  # fmt: skip
def test_deadlock_and_a_stopped_process_are_found_early(first, second):
    hung, when = Job(first, second).hang(200)
    assert hung == (0, 1)
    assert 10 <= when <= 12


def test_saving_has_a_longer_limit():
    for limit in ("auto", 2.0):
        hung, when = Job(saving(1000), in_collective, limit=limit).hang(400)
        assert hung == (0, 1)
        assert 300 <= when <= 302


def test_a_step_may_take_twice_as_long_as_the_longest_step_before():
    slow = Job(asleep, asleep, slow=[100.0])
    assert slow.detector.limit() == pytest.approx(200.0)
    assert slow.hang(199) == ((), None)
    assert slow.hang(210)[0] == (0, 1)


def test_one_c_call_hangs_only_if_its_stack_waits():
    assert Job(in_one_call, in_one_call, limit=2.0).hang(100) == ((), None)
    assert Job(in_one_call, in_one_call, limit=2.0, stacks=((0, 1), ())).hang(9)[0] == (0, 1)
    # Only the stack shows that instance 1 waits, for an instance that computes.
    assert Job(computing, asleep, limit=2.0, stacks=((1,), ())).hang(100) == ((), None)
    assert Job(computing, asleep, limit=2.0).hang(9) == ((1,), 3)


def test_an_ending_instance_has_a_longer_limit_and_is_not_waited_for():
    assert Job(asleep, asleep, limit=2.0, stacks=((), (0, 1))).hang(290) == ((), None)
    assert Job(asleep, asleep, limit=2.0, stacks=((), (0, 1))).hang(310)[0] == (0, 1)
    assert Job(asleep, in_collective, limit=2.0, stacks=((1,), (0,))).hang(9) == ((1,), 3)
    ended = lambda _: {"ending": True}  # noqa: E731
    assert Job(ended, ended, limit=2.0).hang(290) == ((), None)
    # While mpirun is stopped, no instance can leave MPI.
    detector = Job(ended, ended, limit=2.0).detector
    for second in range(1, 8):
        for index in (0, 1):
            detector.activity.record(index, Sample(at=float(second), ending=True), float(second))
        hung = detector.check(float(second), is_blocked=False, is_mpirun_stopped=lambda: True)
    assert hung == (0, 1)


def test_without_samples_the_steps_of_an_instance_decide():
    silent = lambda _: None  # noqa: E731
    assert Job(silent, in_collective, limit=3.0).hang(20)[0] == (0, 1)


def test_with_auto_and_too_few_steps_the_activity_decides():
    detector = HangDetector("auto")
    detector.activity.add(0, 0.0)
    detector.record_progress(0, Progress(0), 0.0)
    found = None
    for second in range(1, 200):
        detector.activity.record(0, Sample(at=float(second), joined=True), float(second))
        if detector.check(float(second), is_blocked=False):
            found = found or second
    assert found == 121


def trained_automatically(detector, instances=2):
    """Let instances make short steps that are counted automatically; return the last's time."""
    for index in range(instances):
        detector.activity.add(index, now=0.0)
    for step in range(21):
        for index in range(instances):
            detector.record_progress(index, Progress(step, doing=AUTOMATIC), 0.1 * step)
    assert detector.limit() == 10.0
    return 2.0


def sampled(detector, now, *awake_seconds, **sample):
    for index, awake in enumerate(awake_seconds):
        values = {"at": now, "awake_seconds": awake, **sample}
        detector.activity.record(index, Sample(**values), now)


@pytest.mark.parametrize("limit", ["auto", 5.0])
def test_a_plain_loop_may_evaluate_between_its_steps(limit):
    """Instance 0 evaluates for an hour, and instance 1 waits for it in any way."""
    detector = HangDetector(limit)
    if limit == "auto":
        began = trained_automatically(detector)
    else:
        began = 0.0
        for index in range(2):
            detector.activity.add(index, now=0.0)
            detector.record_progress(index, Progress(3, doing=AUTOMATIC), 0.0)
    for second in range(0, 3600, 2):
        now = began + second
        sampled(detector, now, float(second), 0.0)
        assert detector.hung(now) == ()
        assert detector.confirm((), (), now) == ()


def test_a_plain_loop_that_waits_for_a_download_has_two_minutes():
    detector = HangDetector("auto")
    began = trained_automatically(detector)
    for second in range(0, 130, 2):
        sampled(detector, began + second, 0.0, 0.0, waits=second > 4)
        assert detector.hung(began + second) == (() if second < 120 else (0, 1))


def test_a_plain_loop_that_stops_hangs_at_a_fixed_limit():
    detector = HangDetector(5.0)
    for index in range(2):
        detector.activity.add(index, now=0.0)
        detector.record_progress(index, Progress(3, doing=AUTOMATIC), float(index))
    sampled(detector, 1.0, 0.0, 0.0)
    sampled(detector, 6.5, 0.0, 0.0)
    assert detector.hung(6.5) == (0, 1)
    assert detector.progress_counts() == {0: (3, 0), 1: (3, 0)}
