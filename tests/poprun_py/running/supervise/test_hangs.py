"""When the silence of an instance counts as a hang."""

from __future__ import annotations

import pytest

from popdist_py.environment import COMPILING, INFERENCE, TRAINING
from poprun_py.running.supervise.hang_detection import HangWatch, Look
from poprun_py.running.supervise.job import Progress


def test_hang_with_a_fixed_limit():
    watch = HangWatch(2.0)
    watch.beat(0, Progress(0), now=0.0)
    assert watch.hung(19.0) == ()  # joining and compiling may take longer
    assert watch.hung(31.0) == (0,)
    watch.beat(0, Progress(1), now=20.0)
    watch.beat(1, Progress(1), now=21.0)
    assert watch.hung(21.9) == ()
    assert watch.hung(22.5) == (0,)
    assert watch.hung(23.5) == (0, 1)
    watch.ended(0, 23.0)
    assert watch.hung(23.5) == (1,)


def test_automatic_limit_follows_the_median_step():
    watch = HangWatch("auto")
    for step in range(20):
        watch.beat(0, Progress(step), now=2.0 * step)
    assert watch.limit() == pytest.approx(40.0)
    assert watch.hung(38 + 39.0) == ()
    assert watch.hung(38 + 41.0) == (0,)


def test_automatic_limit_waits_for_a_few_steps_and_has_a_floor():
    watch = HangWatch("auto")
    watch.beat(0, Progress(1), now=0.0)
    assert watch.limit() is None
    for step in range(2, 20):
        watch.beat(0, Progress(step), now=0.001 * step)
    assert watch.limit() == 10.0


def test_short_steps_that_are_seen_several_at_a_time_all_count():
    watch = HangWatch("auto")
    for now, step in ((0.0, 1), (0.2, 10), (0.4, 20)):
        watch.beat(0, Progress(step), now)
    assert watch.limit() == 10.0


def test_silence_that_nobody_could_hear_does_not_count():
    watch = HangWatch(2.0)
    watch.beat(0, Progress(1), now=0.0)
    watch.excuse(now=10.0)
    assert watch.hung(11.9) == ()
    assert watch.hung(12.1) == (0,)
    assert watch.done() == {0: (1, 0)}


def test_programs_that_count_no_steps_are_left_alone():
    assert HangWatch(0.1).hung(1e9) == ()


def test_a_launcher_that_was_stopped_itself_or_held_up_by_a_reader_blames_nobody():
    watch = HangWatch(2.0)
    for now in (0.0, 0.5, 1.0):
        watch.beat(0, Progress(int(2 * now) + 1), now)
        assert watch.on_time(now, is_held_up=False) == ()
    assert watch.next_deadline() == 1.0 + watch.sample_seconds
    assert watch.on_time(31.0, is_held_up=False) == ()
    for quarter in range(1, 9):
        assert watch.on_time(31.0 + quarter / 4, is_held_up=False) == ()
    assert watch.on_time(33.1, is_held_up=True) == ()
    for quarter in range(1, 9):
        assert watch.on_time(33.1 + quarter / 4, is_held_up=False) == ()
    assert watch.on_time(35.2, is_held_up=False) == (0,)


def trained(watch, steps=20, seconds=2.0):
    """Let instance 0 make steps of so many seconds; returns the time."""
    for step in range(steps + 1):
        watch.beat(0, Progress(step), seconds * step)
    return seconds * steps


def test_a_long_validation_after_short_steps_is_no_hang():
    watch = HangWatch("auto")
    now = trained(watch, seconds=0.1)
    assert watch.limit() == 10.0
    # One call that is seen to begin, and takes longer than any training step may.
    watch.beat(0, Progress(20, doing=INFERENCE), now)
    assert watch.hung(now + 300.0) == ()
    watch.beat(0, Progress(20, 1), now + 300.0)
    # The training step that follows is judged as one, from its beginning on.
    watch.beat(0, Progress(20, 1, doing=TRAINING), now + 350.0)
    assert watch.hung(now + 359.0) == ()
    assert watch.hung(now + 361.0) == (0,)
    watch.beat(0, Progress(21), now + 350.1)
    assert watch.limit() == 10.0  # the validation is no step


def test_validation_calls_are_compared_with_one_another():
    watch = HangWatch("auto")
    now = trained(watch, seconds=0.1)
    for call in range(1, 8):
        watch.beat(0, Progress(20, call), now + 2.0 * call)
    assert (watch.limit(TRAINING), watch.limit(INFERENCE)) == (10.0, pytest.approx(40.0))
    assert watch.hung(now + 14.0 + 39.0) == ()
    assert watch.hung(now + 14.0 + 41.0) == (0,)
    watch.beat(0, Progress(21, 1), now + 15.0)  # a step and a call between two looks
    watch.beat(0, Progress(21, 2), now + 17.0)
    assert watch.limit(INFERENCE) == pytest.approx(40.0)


def test_compiling_another_model_is_no_step_and_may_take_longer():
    watch = HangWatch(2.0)
    now = trained(watch)
    watch.beat(0, Progress(20, doing=COMPILING), now)
    assert watch.hung(now + 29.0) == ()
    assert watch.hung(now + 31.0) == (0,)
    watch.beat(0, Progress(20, doing=INFERENCE), now + 20.0)
    assert watch.hung(now + 21.9) == ()
    assert watch.hung(now + 22.1) == (0,)


def test_the_beginning_of_a_step_does_not_hide_that_its_last_one_is_long_ago():
    watch = HangWatch(2.0)
    watch.beat(0, Progress(5), now=0.0)
    watch.beat(0, Progress(6), now=1.0)
    watch.beat(0, Progress(6, doing=TRAINING), now=2.0)
    assert watch.hung(3.1) == (0,)
    assert watch.silence(0, 3.1) == pytest.approx(2.1)


def test_a_step_that_was_resumed_from_is_none_that_was_made():
    watch = HangWatch("auto")
    watch.beat(0, Progress(1), now=0.0)
    watch.beat(0, Progress(1000, resumed=1000), now=0.1)
    for step in range(1001, 1006):
        watch.beat(0, Progress(step, resumed=1000), now=2.0 * (step - 1000))
    assert watch.limit() is None  # four intervals between steps were seen
    watch.beat(0, Progress(1006, resumed=1000), now=12.0)
    assert watch.limit() == pytest.approx(40.0)
    # Back to an earlier checkpoint: the job goes on as at its start.
    watch.beat(0, Progress(900, resumed=900), now=15.0)
    assert watch.hung(15.0 + 399.0) == ()
    assert watch.hung(15.0 + 401.0) == (0,)


def test_nonsense_of_a_program_does_not_end_the_launcher():
    watch = HangWatch("auto")
    now = trained(watch)
    watch.beat(0, Progress(-3, -1, -7, 99), now)
    assert watch.hung(now + 1) == ()


def test_the_one_that_is_silent_for_longest_comes_first():
    watch = HangWatch(1.0)
    for instance, last in ((0, 3.0), (1, 2.0), (2, 2.5)):
        watch.beat(instance, Progress(1), now=1.0)
        watch.beat(instance, Progress(2), now=last)
    assert watch.hung(3.1) == (1,)
    assert watch.hung(5.0) == (1, 2, 0)


class Job:
    """Two instances that have made 20 steps of 20 ms, looked at every second from then on.

    Each is a function from seconds to what its Look says, or to None: its wrapper is silent.
    """

    def __init__(self, *instances, limit="auto", stacks=None, slow=()):
        self.watch, self.instances = HangWatch(limit), instances
        self.waiting, self.ending = stacks or ((), ())
        for index in range(len(instances)):
            self.watch.life.started(index, 0.0)
            for step in range(21):
                self.watch.beat(index, Progress(step), 0.02 * step - 0.4)
        now = 0.0
        for step, pause in enumerate(slow, 21):
            now += pause
            for index in range(len(instances)):
                self.watch.beat(index, Progress(step), now)
        self.began = now
        self.watch.on_time(now, is_held_up=False)

    def hang(self, until):
        """Return the instances that hang, and after how many seconds."""
        for second in range(1, round(until) + 1):
            now = self.began + second
            for index, look in enumerate(self.instances):
                if (fields := look(second)) is not None:
                    # Its host has another clock.
                    self.watch.life.look(index, Look(at=now + 500, **fields), now)
            if self.watch.on_time(now, is_held_up=False):
                hung = self.watch.judged(self.waiting, self.ending, now)
                if hung:
                    return hung, second
        return (), None


def asleep(second):
    return {}


def in_collective(second):
    """It waits in a collective of the library, and looks for the others now and then."""
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
def test_work_between_steps_is_no_hang_nor_is_waiting_for_it(work, limit):
    until = 16 if work(16).get("saves") else 200
    assert Job(work, in_collective, limit=limit).hang(until) == ((), None)
    assert Job(work, work, limit=limit).hang(until) == ((), None)


def test_sleep_after_short_steps_has_two_minutes_with_auto():
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


def test_saving_has_a_limit_of_its_own():
    for limit in ("auto", 2.0):
        hung, when = Job(saving(1000), in_collective, limit=limit).hang(400)
        assert hung == (0, 1)
        assert 300 <= when <= 302


def test_what_a_job_has_shown_to_need_it_may_need_again():
    slow = Job(asleep, asleep, slow=[100.0])
    assert slow.watch.limit() == pytest.approx(200.0)
    assert slow.hang(199) == ((), None)
    assert slow.hang(210)[0] == (0, 1)


def test_one_call_of_c_is_a_hang_only_where_its_stack_waits():
    assert Job(in_one_call, in_one_call, limit=2.0).hang(100) == ((), None)
    assert Job(in_one_call, in_one_call, limit=2.0, stacks=((0, 1), ())).hang(9)[0] == (0, 1)
    # Its stack alone tells of instance 1 that it waits, for one that computes.
    assert Job(computing, asleep, limit=2.0, stacks=((1,), ())).hang(100) == ((), None)
    assert Job(computing, asleep, limit=2.0).hang(9) == ((1,), 3)


def test_an_end_has_a_limit_of_its_own_and_joins_nobody():
    assert Job(asleep, asleep, limit=2.0, stacks=((), (0, 1))).hang(290) == ((), None)
    assert Job(asleep, asleep, limit=2.0, stacks=((), (0, 1))).hang(310)[0] == (0, 1)
    assert Job(asleep, in_collective, limit=2.0, stacks=((1,), (0,))).hang(9) == ((1,), 3)
    ended = lambda _: {"ending": True}  # noqa: E731
    assert Job(ended, ended, limit=2.0).hang(290) == ((), None)
    # Without mpirun none of them can leave MPI.
    watch = Job(ended, ended, limit=2.0).watch
    for second in range(1, 8):
        for index in (0, 1):
            watch.life.look(index, Look(at=float(second), ending=True), float(second))
        hung = watch.on_time(float(second), is_held_up=False, is_mpirun_stopped=True)
    assert hung == (0, 1)


def test_an_instance_whose_wrapper_is_silent_is_judged_by_its_steps():
    silent = lambda _: None  # noqa: E731
    assert Job(silent, in_collective, limit=3.0).hang(20)[0] == (0, 1)


def test_auto_without_steps_to_compare_with_looks_at_what_moves():
    watch = HangWatch("auto")
    watch.life.started(0, 0.0)
    watch.beat(0, Progress(0), 0.0)
    found = None
    for second in range(1, 200):
        watch.life.look(0, Look(at=float(second), joined=True), float(second))
        if watch.on_time(float(second), is_held_up=False):
            found = found or second
    assert found == 121
