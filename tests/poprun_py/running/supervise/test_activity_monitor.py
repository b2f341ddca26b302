"""Activity of instances, and hangs of jobs that count no steps, with a clock of the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.supervise.activity_monitor import ActivityMonitor
from poprun_py.running.supervise.activity_monitor import ActivitySample as Sample
from poprun_py.running.supervise.hang_detection import HangDetector
from poprun_py.running.supervise.launch_result import Progress

LIMIT = 10.0
INTERVAL = 1.0


class Job:
    """Instances with a sample every second; each is a function from the time to its sample."""

    def __init__(self, *instances, limit=LIMIT):
        self.monitor = ActivityMonitor(limit)
        self.instances = instances
        for index in range(len(instances)):
            self.monitor.add(index, 0.0)

    def hang(self, until):
        """Return the instances that hang, and the time; no instances if none does by ``until``."""
        for second in range(round(until) + 1):
            now = float(second)
            for index, sample in enumerate(self.instances):
                self.monitor.record(index, sample(now), now)
            if hung := self.monitor.hung(now):
                return hung, now
        return (), None


def idle(now):
    """The clock of its host differs from the launcher's."""
    return Sample(at=now + 500)


def computing(now):
    """It always runs Python."""
    return Sample(at=now + 500, awake_seconds=now)


def in_one_call(begin):
    """It is in one C call, which uses a CPU, since ``begin``."""

    def sample(now):
        # The wrapper checks it at the first sample, and gets the answer after the second.
        return Sample(at=now + 500, awake_seconds=now, away=max(0.0, now - begin - INTERVAL))

    return sample


def test_idle_instances_hang_after_the_limit():
    assert Job(idle, idle).hang(30) == ((0, 1), LIMIT)


def test_a_job_does_not_hang_while_one_instance_computes():
    job = Job(idle, computing, idle)
    assert job.hang(300) == ((), None)


@pytest.mark.parametrize(
    "activity",
    [
        lambda n: Sample(at=n, written=10 * n),
        lambda n: Sample(at=n, call=(n, 1, 0)),
        lambda n: Sample(at=n, call=(7, 1, n % 2)),
        lambda n: Sample(at=n, awake_seconds=0.3 * n),
        lambda n: Sample(at=n, moved_bytes=10**6 * n),
        lambda n: Sample(at=n, received_bytes=100_000 * n),
        lambda n: Sample(at=n, saves=n < 10, written=n // 10),
        lambda n: Sample(at=n, reads=n < 10, written=n // 10),
    ],
)
def test_each_kind_of_activity_counts(activity):
    """The instance is active every eight seconds, for 80 s. The job hangs after the limit."""

    def sample(now):
        whole = int(min(now, 80)) // 8
        return Sample(**{**_fields(activity(whole)), "at": now})

    assert Job(idle, sample).hang(200) == ((0, 1), 80 + LIMIT)


def _fields(sample):
    return {name: getattr(sample, name) for name in Sample.__slots__}


def test_waking_up_now_and_then_is_not_activity():
    def waking(now):
        return Sample(at=now, awake_seconds=0.04 * now, moved_bytes=int(10_000 * now))

    assert Job(waking, idle).hang(30) == ((0, 1), LIMIT)


def test_cpu_time_while_the_library_waits_does_not_count():
    def sample(now):
        return Sample(at=now, awake_seconds=now, call=(3, 1, 1), waits=True)

    assert Job(sample, sample).hang(30) == ((0, 1), LIMIT)


def test_work_of_other_threads_does_not_count_while_an_instance_waits_or_is_stopped():
    for state in ("waits", "stopped"):

        def sample(now, state=state):
            moved = {"moved_bytes": int(1e7 * now), "received_bytes": int(1e6 * now)}
            return Sample(at=now, awake_seconds=now, call=(3, 1, 1), **moved, **{state: True})

        assert Job(sample, sample).hang(30) == ((0, 1), LIMIT)


def test_a_slow_download_is_activity_and_a_short_message_to_a_monitor_is_not():
    download = lambda now: Sample(at=now, received_bytes=int(8_000 * now))  # noqa: E731
    assert Job(idle, download).hang(300) == ((), None)
    monitor = lambda now: Sample(at=now, received_bytes=9_000 * (int(now) // 6))  # noqa: E731
    assert Job(idle, monitor).hang(30) == ((0, 1), LIMIT)


def test_ending_and_saving_instances_have_a_longer_limit():
    ending = lambda now: Sample(at=now, ending=True)  # noqa: E731
    saving = lambda now: Sample(at=now, saves=True)  # noqa: E731
    assert Job(ending, idle).hang(30) == ((1,), LIMIT)
    assert Job(ending, ending).hang(400) == ((0, 1), 300.0)
    assert Job(saving, idle).hang(400) == ((0, 1), 300.0)
    assert Job(saving, ending, limit="auto").hang(400) == ((0, 1), 300.0)


def test_a_c_call_that_computes_does_not_hang_after_mark_working():
    job = Job(idle, in_one_call(begin=20.0))
    hung, now = job.hang(60)
    assert (hung, now) == ((0, 1), 20 + INTERVAL + LIMIT)
    assert [job.monitor.of(index).is_active(now) for index in (0, 1)] == [False, True]
    job.monitor.of(1).mark_working(now)
    assert job.monitor.hung(now + LIMIT - 0.1) == ()


def test_successive_c_calls_do_not_hang():
    """Each call takes less than the limit, and the instance runs Python between them."""

    def sample(now):
        return Sample(at=now, awake_seconds=now, away=(now % 9) if now % 9 > 1 else 0.0)

    assert Job(sample, sample).hang(300) == ((), None)


def test_the_end_of_an_instance_restarts_the_idle_times_of_the_others():
    job = Job(idle, computing)
    assert job.hang(50) == ((), None)
    job.monitor.remove(1, 50.0)
    assert job.monitor.hung(50.0 + LIMIT - 0.1) == ()
    job.monitor.record(0, idle(61.0), 61.0)
    assert job.monitor.hung(61.0) == (0,)
    job.monitor.remove(0, 62.0)
    assert job.monitor.hung(1e9) == ()


def test_the_first_collective_may_take_as_long_as_a_first_step():
    def joined(now):
        return Sample(at=now, joined=True)

    assert Job(joined, idle, limit=2.0).hang(90) == ((0, 1), 30.0)
    made_one = lambda now: Sample(at=now, joined=True, call=(1, 1, 0))  # noqa: E731
    assert Job(made_one, made_one, limit=2.0).hang(90) == ((0, 1), 2.0)


def test_with_auto_a_program_may_sleep_for_a_minute():
    assert Job(idle, idle, limit="auto").hang(300) == ((0, 1), 120.0)


def test_delayed_samples_count_for_the_time_at_which_they_were_made():
    monitor = ActivityMonitor(2.0)
    monitor.add(0, 0.0)
    monitor.record(0, Sample(at=100.0), 0.0)
    monitor.record(0, Sample(at=100.5), 1.0)
    assert monitor.hung(5.0) == ()  # no sample has arrived since
    monitor.record(0, Sample(at=105.0, written=1), 5.5)
    assert monitor.hung(5.5) == ()
    assert monitor.hung(25.0) == (0,)  # its wrapper may also be stopped


def test_samples_made_while_the_launcher_was_stopped_do_not_count():
    """After Ctrl-Z, the wrappers continue to sample, and the launcher reads all samples at once."""
    monitor = ActivityMonitor(2.0)
    monitor.add(0, 0.0)
    monitor.record(0, Sample(at=0.0), 0.0)
    monitor.reset_timers(100.0)
    for second in range(1, 100):
        monitor.record(0, Sample(at=float(second)), 100.0)
    assert monitor.hung(101.0) == ()
    monitor.record(0, Sample(at=102.0), 102.0)
    assert monitor.hung(102.0) == (0,)


def test_only_instances_that_count_steps_can_hang_if_there_are_any():
    detector = HangDetector(2.0)
    for instance in (0, 1):
        detector.activity.add(instance, 0.0)
    detector.record_progress(0, Progress(1), 0.0)
    detector.record_progress(0, Progress(2), 49.0)
    for second in range(50):
        detector.activity.record(1, idle(float(second)), float(second))
    assert detector.hung(50.0) == ()
    assert detector.hung(51.5) == (0,)
    assert detector.progress_counts() == {0: (2, 0)}
    # The instance that counts steps ends, and the other one is judged from then on.
    detector.remove(0, 50.0)
    assert detector.hung(51.9) == ()
    detector.activity.record(1, idle(52.5), 52.5)
    assert detector.hung(52.5) == (1,)


def test_the_sample_interval_follows_from_the_limit():
    assert [ActivityMonitor(limit).sample_interval for limit in (0.1, 4.0, 3600.0, "auto")] == [
        *(0.1, 0.5, 2.0, 2.0)
    ]


MOMENTS = st.sets(st.integers(1, 100))


@given(active_at=st.lists(MOMENTS, min_size=1, max_size=4))
def test_a_job_hangs_when_the_limit_has_passed_since_the_last_activity(active_at):
    def instance(moments):
        return lambda now: Sample(at=now, written=sum(1 for moment in moments if moment <= now))

    last, expected = 0, None
    for moment in sorted(set().union(*active_at)):
        if moment - last > LIMIT:
            break
        last = moment
    expected = last + LIMIT
    hung, when = Job(*map(instance, active_at)).hang(200)
    assert (sorted(hung), when) == (list(range(len(active_at))), expected)
