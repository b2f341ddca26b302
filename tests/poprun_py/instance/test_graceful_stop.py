"""Ask once, wait, force: whatever is ended, and whenever it is told to."""

from __future__ import annotations

from poprun_py.instance.graceful_stop import GracefulStop

NEVER = float("inf")


def steps(**settings):
    done = []
    ending = GracefulStop(lambda: done.append("ask"), lambda: done.append("force"), **settings)
    return ending, done


def test_asked_once_and_forced_at_the_end_of_the_grace_time():
    ending, done = steps()
    assert (ending.asked_at, ending.next_deadline()) == (None, NEVER)
    ending.begin(10.0, 5)
    ending.begin(11.0, 5)
    assert (done, ending.asked_at, ending.next_deadline()) == (["ask"], 10.0, 15.0)
    ending.on_time(14.9)
    assert done == ["ask"]
    ending.on_time(15.0)
    assert (done, ending.next_deadline()) == (["ask", "force"], NEVER)


def test_less_time_counts_and_more_does_not():
    ending, _ = steps()
    ending.begin(10.0, 5)
    ending.force_after(1, 11.0)
    assert ending.next_deadline() == 12.0
    ending.begin(11.0, 100)
    assert ending.next_deadline() == 12.0


def test_force_is_repeated_where_more_may_appear():
    ending, done = steps(again_seconds=0.5)
    ending.force_after(1, 10.0)
    for now in (11.0, 11.4, 11.5):
        ending.on_time(now)
    assert done == ["force", "force"]
    assert ending.asked_at is None


def test_without_a_grace_time_nothing_is_forced():
    ending, done = steps()
    ending.begin(10.0)
    ending.on_time(1e9)
    assert done == ["ask"]
