"""Each nanosecond belongs to one activity, and each step contains its waiting time."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py import activities, environment, heartbeat
from popdist_py.activities import (
    COMPUTING,
    LOADING,
    OTHER,
    REDUCING,
    SAVING,
    VALIDATING,
    WAITING,
    doing,
    ledger,
)


class Clock:
    """Stands for ``time``: moves when it is told to."""

    def __init__(self):
        self.now = 1_000

    def monotonic_ns(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """Give each test counters of its own, and the clock that they read."""
    clock = Clock()
    fresh(monkeypatch, clock)
    return clock


def fresh(monkeypatch, clock):
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr(ledger, "_words", None)
    monkeypatch.setattr(heartbeat, "_words", None)
    monkeypatch.setattr(ledger, "_last_step", (0, 0, 0, 0))
    monkeypatch.setattr(ledger, "_listener", None)
    activities.begin()


def spent():
    """Return the nanoseconds of each activity that has some, by name."""
    words, first = ledger._words, ledger._NANOSECONDS
    counts = dict(zip(activities.NAMES, words[first : first + len(activities.NAMES)], strict=True))
    return {name: count for name, count in counts.items() if count}


def rows():
    """Return the rows of the last steps, the oldest first."""
    words, made = ledger._words, ledger._words[ledger._STEPS]
    kept = range(max(0, made - ledger._RING), made)
    places = (ledger._ROWS + step % ledger._RING * ledger._ROW_WORDS for step in kept)
    return [ledger._ROW.unpack_from(words, 8 * place) for place in places]


def test_time_inside_another_activity_is_not_the_outers(clock):
    clock.now += 1
    with doing(COMPUTING):
        clock.now += 10
        with doing(REDUCING):
            clock.now += 100
            with doing(WAITING):
                clock.now += 1000
        clock.now += 20
    assert spent() == {"other": 1, "computing": 30, "reducing": 100, "waiting": 1000}


@given(
    st.recursive(st.integers(0, 99), lambda inner: st.tuples(st.integers(0, 9), st.lists(inner)))
)
def test_shares_add_up_to_all_of_the_time(program):
    clock = Clock()

    def run(part):
        if isinstance(part, int):
            clock.now += part
        else:
            with doing(part[0]):
                for each in part[1]:
                    run(each)

    with pytest.MonkeyPatch.context() as patch:
        fresh(patch, clock)
        with doing(OTHER):
            run(program)
        assert sum(spent().values()) == clock.now - ledger._words[ledger._BEGAN]


def last_call():
    """Return number, name and state of the collective that the launcher is told of."""
    word = ledger._words[ledger._CALL]
    return word >> 8, environment.COLLECTIVES[word >> 1 & 127], "goes on" if word & 1 else "ended"


def test_collectives_are_numbered_by_what_they_are(clock, monkeypatch):
    monkeypatch.setattr(ledger, "_num_calls", 0)
    with doing(REDUCING, "all_reduce"):
        clock.now += 7
        assert last_call() == (1, "all_reduce", "goes on")
        assert ledger._words[ledger._CALL_BEGAN] == 1_000
        with doing(WAITING, "all_reduce"):  # no collective, whatever its name
            pass
    assert last_call() == (1, "all_reduce", "ended")
    with doing(REDUCING, "gradients"), doing(REDUCING):  # of a training step
        assert last_call() == (1, "all_reduce", "ended")
    beside = doing(REDUCING, "beside the program", "barrier")
    for number in (2, 3):
        with beside:
            assert last_call() == (number, "barrier", "goes on")
    with pytest.raises(KeyError), doing(REDUCING, "broadcast"):
        raise KeyError
    assert last_call() == (4, "broadcast", "ended")


def test_of_two_collectives_at_once_the_later_one_is_told_of(clock, monkeypatch):
    monkeypatch.setattr(ledger, "_num_calls", 0)
    first, second = doing(REDUCING, "gather"), doing(REDUCING, "scatter")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert last_call() == (2, "scatter", "goes on")
    second.__exit__(None, None, None)
    assert last_call() == (2, "scatter", "ended")


def test_an_error_ends_the_activity_that_it_leaves(clock):
    def fail():
        with doing(LOADING):
            clock.now += 5
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 7
    with doing(COMPUTING):
        pass
    assert spent() == {"loading": 5, "other": 7}


def test_steps_leave_out_what_is_no_step_and_know_what_they_waited(clock):
    heartbeat.step(8)  # the time of the first step is unknown
    clock.now += 30
    with doing(WAITING):
        clock.now += 12
    heartbeat.step(8)
    with doing(SAVING):
        clock.now += 1000
    clock.now += 40
    heartbeat.step(8)
    assert [row[:5] for row in rows()] == [
        (1, 1_000, -1, -1, 8),
        (2, 1_042, 42, 30, 8),
        (3, 2_082, 40, 40, 8),
    ]
    assert (ledger._words[ledger._SAMPLES], ledger._words[ledger._TIMED_STEPS]) == (24, 2)


def test_the_ring_keeps_the_last_steps(clock):
    for step in range(ledger._RING + 11):
        clock.now += step
        heartbeat.step()
    assert [row[2] for row in rows()] == list(range(11, ledger._RING + 11))


def test_a_step_that_ends_inside_what_is_no_step_took_no_less_than_nothing(clock):
    heartbeat.step()
    with doing(SAVING):
        clock.now += 50
        heartbeat.step()
        clock.now += 7
    clock.now += 1
    heartbeat.step()
    assert [row[2] for row in rows()] == [-1, 50, 0]


@pytest.mark.parametrize("loss", [None, 0.0, -1.5, 5e-324, math.inf, -math.inf, math.nan])
def test_a_loss_that_nobody_knows_is_told_from_every_number(clock, loss):
    heartbeat.step(1, loss)
    word = ledger._words[ledger._ROWS + ledger._ROW_WORDS - 1]
    assert (word == ledger._UNKNOWN_BITS) == (loss is None)
    if loss is not None:
        assert repr(rows()[0][5]) == repr(loss)


def test_a_nan_of_the_very_bits_is_a_nan(clock):
    heartbeat.step(1, ledger._UNKNOWN_LOSS)
    assert ledger._words[ledger._ROWS + ledger._ROW_WORDS - 1] != ledger._UNKNOWN_BITS
    assert math.isnan(rows()[0][5])


def test_another_thread_takes_none_of_the_programs_time(clock):
    def reduce():
        with doing(REDUCING):
            clock.now += 50

    thread = threading.Thread(target=reduce)
    with doing(COMPUTING):
        thread.start()
        thread.join()
        assert ledger._words[ledger._ACTIVITY] == COMPUTING
    assert spent() == {"computing": 50}


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_that_comes_first_does_not_take_the_counting(clock, monkeypatch):
    def load():
        with doing(LOADING):
            clock.now += 50

    monkeypatch.setattr(ledger, "_words", None)
    in_a_thread(load)
    with doing(COMPUTING):
        clock.now += 7
        in_a_thread(load)
    assert spent() == {"other": 50, "computing": 57}


def test_a_thread_that_trains_counts(clock):
    def train():
        with doing(COMPUTING):
            clock.now += 5
            heartbeat.step(1)
            clock.now += 1
        with doing(COMPUTING):
            clock.now += 30
            heartbeat.step(1)

    with doing(LOADING):
        in_a_thread(train)  # the main thread is in an activity
    in_a_thread(train)
    assert spent() == {"loading": 36, "other": 6, "computing": 30}


def test_awaiting_the_background_is_waiting_as_far_as_the_background_waits(clock):
    def reduce():
        with doing(REDUCING):
            clock.now += 50
            with doing(WAITING):
                clock.now += 300

    thread = threading.Thread(target=reduce)
    with activities.awaiting_background():
        thread.start()
        thread.join()
    assert spent() == {"reducing": 50, "waiting": 300}


def test_a_wait_that_began_before_counts_as_long_as_it_was_awaited(clock):
    def wait():
        with doing(WAITING):
            begun.set()
            go_on.wait()

    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    with doing(COMPUTING):
        clock.now += 1000
    with activities.awaiting_background():
        clock.now += 70
        go_on.set()
        thread.join()
    assert spent() == {"computing": 1000, "waiting": 70}


class Listener:
    """Remembers what it is told."""

    def __init__(self):
        self.told = []

    def begun(self, *activity):
        self.told.append(("begun", *activity))
        return len(self.told)

    def ended(self, *activity):
        self.told.append(("ended", *activity))

    def step(self, *moments):
        self.told.append(("step", *moments))


@pytest.fixture
def told():
    """What a listener is told."""
    listener = Listener()
    activities.listen(listener)
    yield listener.told
    activities.listen(None)


def test_a_listener_is_told_of_what_begins_and_ends(clock, told):
    with doing(REDUCING, "gradients"):
        clock.now += 5
        with doing(WAITING):
            clock.now += 6
    activities.listen(None)
    with doing(LOADING):
        pass
    assert told == [
        ("begun", REDUCING, "gradients", 1000),
        ("begun", WAITING, "", 1005),
        ("ended", WAITING, "", 1005, 1011, 2),
        ("ended", REDUCING, "gradients", 1000, 1011, 1),
    ]


def test_a_listener_is_told_of_steps_in_which_nothing_computes(clock, told):
    """Other steps have a span already. A validation does not belong to the step after it."""
    for seconds in (5, 6):
        clock.now += seconds
        activities.step_done()
    with doing(VALIDATING):
        clock.now += 100
    clock.now += 7
    activities.step_done()
    with doing(COMPUTING):
        clock.now += 8
    activities.step_done()
    steps = [moments for kind, *moments in told if kind == "step"]
    assert steps == [[1005, 1011], [1111, 1118]]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_the_program_do_not_count_as_the_program(method, monkeypatch, tmp_path):
    """A loader's process loads, while the program may compute."""
    memory = tmp_path / "words"
    memory.write_bytes(bytes(8 * ledger._NUM_WORDS))
    monkeypatch.setenv("POPDIST_HEARTBEAT", str(memory))
    fresh(monkeypatch, time)
    before = bytes(ledger._words)
    child = multiprocessing.get_context(method).Process(target=load_in_child)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert bytes(ledger._words) == before


def load_in_child():
    with doing(LOADING):
        pass
    activities.step_done(5)
    os._exit(0 if ledger._words[ledger._SAMPLES] == 5 else 1)


def test_memory_of_an_older_wrapper_is_too_small_and_left_alone(monkeypatch, tmp_path):
    memory = tmp_path / "words"
    memory.write_bytes(bytes(80))
    monkeypatch.setenv("POPDIST_HEARTBEAT", str(memory))
    fresh(monkeypatch, time)
    with doing(LOADING):
        pass
    assert memory.read_bytes() == bytes(80)
    assert "loading" in spent()


@pytest.mark.parametrize("activity", [-1, 10, "loading", None])
def test_what_is_no_activity_is_refused(activity):
    with pytest.raises(ValueError, match="expected a constant of"):
        doing(activity)
