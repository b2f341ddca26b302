"""When the silence of an instance counts as a hang."""

from __future__ import annotations

import pytest

from poprun_py.supervision.hang_detection import HangWatch


def test_hang_with_a_fixed_limit():
    watch = HangWatch(2.0)
    watch.beat(0, 0, now=0.0)
    assert watch.hung(19.0) == ()  # joining and compiling may take longer
    assert watch.hung(31.0) == (0,)
    watch.beat(0, 1, now=20.0)
    watch.beat(1, 1, now=21.0)
    assert watch.hung(21.9) == ()
    assert watch.hung(22.5) == (0,)
    assert watch.hung(23.5) == (0, 1)
    watch.ended(0)
    assert watch.hung(23.5) == (1,)


def test_automatic_limit_follows_the_median_step():
    watch = HangWatch("auto")
    for step in range(20):
        watch.beat(0, step, now=2.0 * step)
    assert watch.limit == pytest.approx(40.0)
    assert watch.hung(38 + 39.0) == ()
    assert watch.hung(38 + 41.0) == (0,)


def test_automatic_limit_waits_for_a_few_steps_and_has_a_floor():
    watch = HangWatch("auto")
    watch.beat(0, 1, now=0.0)
    assert watch.limit is None
    for step in range(2, 20):
        watch.beat(0, step, now=0.001 * step)
    assert watch.limit == 10.0


def test_silence_that_nobody_could_hear_does_not_count():
    watch = HangWatch(2.0)
    watch.beat(0, 1, now=0.0)
    watch.excuse(now=10.0)
    assert watch.hung(11.9) == ()
    assert watch.hung(12.1) == (0,)
    assert watch.steps() == {0: 1}


def test_programs_that_count_no_steps_are_left_alone():
    assert HangWatch(0.1).hung(1e9) == ()


def test_a_launcher_that_was_stopped_itself_or_held_up_by_a_reader_blames_nobody():
    watch = HangWatch(2.0)
    for now in (0.0, 0.5, 1.0):
        watch.beat(0, int(2 * now) + 1, now)
        assert watch.on_time(now, is_held_up=False) == ()
    assert watch.next_deadline() == 1.0 + watch.sample_seconds
    assert watch.on_time(31.0, is_held_up=False) == ()
    for quarter in range(1, 9):
        assert watch.on_time(31.0 + quarter / 4, is_held_up=False) == ()
    assert watch.on_time(33.1, is_held_up=True) == ()
    for quarter in range(1, 9):
        assert watch.on_time(33.1 + quarter / 4, is_held_up=False) == ()
    assert watch.on_time(35.2, is_held_up=False) == (0,)
