"""When a job that counts no steps hangs: what moves in its instances, on a clock of the test's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.supervise.hang_detection import HangWatch, LifeWatch, Look
from poprun_py.running.supervise.job import Progress

LIMIT = 10.0
INTERVAL = 1.0


class Job:
    """Instances that are looked at every second; each is a function from seconds to a Look."""

    def __init__(self, *instances, limit=LIMIT):
        self.watch = LifeWatch(limit)
        self.instances = instances
        for index in range(len(instances)):
            self.watch.started(index, 0.0)

    def hang(self, until):
        """Return the instances that hang, and when they do; until then nothing is seen."""
        for second in range(round(until) + 1):
            now = float(second)
            for index, look in enumerate(self.instances):
                # Their host has another clock.
                self.watch.look(index, look(now), now)
            if hung := self.watch.hung(now):
                return hung, now
        return (), None


def still(now):
    return Look(at=now + 500)


def computing(now):
    """Python, for all of the time."""
    return Look(at=now + 500, awake_seconds=now)


def in_one_call(begin):
    """In one call of C that uses a CPU, from ``begin`` on."""

    def look(now):
        # It is asked at the first look, and has not answered at the second.
        return Look(at=now + 500, awake_seconds=now, away=max(0.0, now - begin - INTERVAL))

    return look


def test_nothing_moves():
    assert Job(still, still).hang(30) == ((0, 1), LIMIT)


def test_one_that_computes_while_the_others_wait_is_no_hang():
    job = Job(still, computing, still)
    assert job.hang(300) == ((), None)


@pytest.mark.parametrize(
    "sign",
    [
        lambda n: Look(at=n, written=10 * n),
        lambda n: Look(at=n, call=(n, 1, 0)),
        lambda n: Look(at=n, call=(7, 1, n % 2)),
        lambda n: Look(at=n, awake_seconds=0.3 * n),
        lambda n: Look(at=n, moved_bytes=10**6 * n),
        lambda n: Look(at=n, received_bytes=100_000 * n),
        lambda n: Look(at=n, saves=n < 10, written=n // 10),
        lambda n: Look(at=n, reads=n < 10, written=n // 10),
    ],
)
def test_each_sign_of_life_counts(sign):
    """Every eight seconds, and the job hangs ten seconds after the last."""

    def look(now):
        whole = int(min(now, 80)) // 8
        return Look(**{**_fields(sign(whole)), "at": now})

    assert Job(still, look).hang(200) == ((0, 1), 80 + LIMIT)


def _fields(look):
    return {name: getattr(look, name) for name in Look.__slots__}


def test_waking_up_now_and_then_is_no_sign_of_life():
    idle = lambda now: Look(at=now, awake_seconds=0.04 * now, moved_bytes=int(10_000 * now))  # noqa: E731
    assert Job(idle, still).hang(30) == ((0, 1), LIMIT)


def test_cpu_time_while_the_library_waits_does_not_count():
    def look(now):
        return Look(at=now, awake_seconds=now, call=(3, 1, 1), waits=True)

    assert Job(look, look).hang(30) == ((0, 1), LIMIT)


def test_what_other_threads_do_is_no_sign_of_life_of_one_that_waits_or_is_stopped():
    for state in ("waits", "stopped"):

        def look(now, state=state):
            moved = {"moved_bytes": int(1e7 * now), "received_bytes": int(1e6 * now)}
            return Look(at=now, awake_seconds=now, call=(3, 1, 1), **moved, **{state: True})

        assert Job(look, look).hang(30) == ((0, 1), LIMIT)


def test_a_slow_download_is_a_sign_of_life_and_a_word_to_a_monitor_is_none():
    download = lambda now: Look(at=now, received_bytes=int(8_000 * now))  # noqa: E731
    assert Job(still, download).hang(300) == ((), None)
    monitor = lambda now: Look(at=now, received_bytes=9_000 * (int(now) // 6))  # noqa: E731
    assert Job(still, monitor).hang(30) == ((0, 1), LIMIT)


def test_one_that_ends_or_saves_has_a_limit_of_its_own():
    ending = lambda now: Look(at=now, ending=True)  # noqa: E731
    saving = lambda now: Look(at=now, saves=True)  # noqa: E731
    assert Job(ending, still).hang(30) == ((1,), LIMIT)
    assert Job(ending, ending).hang(400) == ((0, 1), 300.0)
    assert Job(saving, still).hang(400) == ((0, 1), 300.0)
    assert Job(saving, ending, limit="auto").hang(400) == ((0, 1), 300.0)


def test_one_call_of_c_is_asked_about_and_excused_if_it_computes():
    job = Job(still, in_one_call(begin=20.0))
    hung, now = job.hang(60)
    assert (hung, now) == ((0, 1), 20 + INTERVAL + LIMIT)
    assert job.watch.busy(now) == (1,)
    job.watch.computes(1, now)
    assert job.watch.hung(now + LIMIT - 0.1) == ()


def test_calls_of_c_one_after_the_other_are_no_hang():
    """Each takes less than the limit, and looks find Python only between them."""

    def look(now):
        return Look(at=now, awake_seconds=now, away=(now % 9) if now % 9 > 1 else 0.0)

    assert Job(look, look).hang(300) == ((), None)


def test_an_instance_that_ends_gives_the_others_time():
    job = Job(still, computing)
    assert job.hang(50) == ((), None)
    job.watch.ended(1, 50.0)
    assert job.watch.hung(50.0 + LIMIT - 0.1) == ()
    job.watch.look(0, still(61.0), 61.0)
    assert job.watch.hung(61.0) == (0,)
    job.watch.ended(0, 62.0)
    assert job.watch.hung(1e9) == ()


def test_the_first_collective_has_the_time_of_a_first_step():
    def joined(now):
        return Look(at=now, joined=True)

    assert Job(joined, still, limit=2.0).hang(90) == ((0, 1), 30.0)
    made_one = lambda now: Look(at=now, joined=True, call=(1, 1, 0))  # noqa: E731
    assert Job(made_one, made_one, limit=2.0).hang(90) == ((0, 1), 2.0)


def test_auto_lets_a_program_sleep_for_a_minute():
    assert Job(still, still, limit="auto").hang(300) == ((0, 1), 120.0)


def test_looks_that_a_busy_host_delays_tell_of_the_time_when_they_were_made():
    watch = LifeWatch(2.0)
    watch.started(0, 0.0)
    watch.look(0, Look(at=100.0), 0.0)
    watch.look(0, Look(at=100.5), 1.0)
    assert watch.hung(5.0) == ()  # nobody has looked since
    watch.look(0, Look(at=105.0, written=1), 5.5)
    assert watch.hung(5.5) == ()
    assert watch.hung(25.0) == (0,)  # as if its wrapper was stopped with it


def test_looks_made_while_the_job_was_stopped_do_not_count():
    """Ctrl-Z: the wrappers go on looking, and the launcher reads all of it afterwards."""
    watch = LifeWatch(2.0)
    watch.started(0, 0.0)
    watch.look(0, Look(at=0.0), 0.0)
    watch.excuse(100.0)
    for second in range(1, 100):
        watch.look(0, Look(at=float(second)), 100.0)
    assert watch.hung(101.0) == ()
    watch.look(0, Look(at=102.0), 102.0)
    assert watch.hung(102.0) == (0,)


def test_a_job_with_steps_is_judged_by_these_alone():
    watch = HangWatch(2.0)
    for instance in (0, 1):
        watch.life.started(instance, 0.0)
    watch.beat(0, Progress(1), 0.0)
    watch.beat(0, Progress(2), 49.0)
    for second in range(50):
        watch.life.look(1, still(float(second)), float(second))
    assert watch.hung(50.0) == ()
    assert watch.hung(51.5) == (0,)
    assert watch.done() == {0: (2, 0)}
    # The one that counts ends well; the other is judged from there on.
    watch.ended(0, 50.0)
    assert watch.hung(51.9) == ()
    watch.life.look(1, still(52.5), 52.5)
    assert watch.hung(52.5) == (1,)


def test_how_often_to_look_follows_from_the_limit():
    assert [LifeWatch(limit).look_seconds for limit in (0.1, 4.0, 3600.0, "auto")] == [
        *(0.1, 0.5, 2.0, 2.0)
    ]


MOMENTS = st.sets(st.integers(1, 100))


@given(signs=st.lists(MOMENTS, min_size=1, max_size=4))
def test_a_job_hangs_once_the_limit_has_passed_since_the_last_sign_of_any_instance(signs):
    def instance(moments):
        return lambda now: Look(at=now, written=sum(1 for moment in moments if moment <= now))

    last, expected = 0, None
    for moment in sorted(set().union(*signs)):
        if moment - last > LIMIT:
            break
        last = moment
    expected = last + LIMIT
    hung, when = Job(*map(instance, signs)).hang(200)
    assert (sorted(hung), when) == (list(range(len(signs))), expected)
