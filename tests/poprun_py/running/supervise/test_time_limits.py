"""Time limits of a job, with a clock of the test."""

from __future__ import annotations

from poprun_py.running.supervise.job_description import JobLimits
from poprun_py.running.supervise.launch_result import Cause
from poprun_py.running.supervise.shutdown import TimeLimits

NEVER = float("inf")


def make_limits(timeout, spent=0, now=0.0):
    """Return limits with a grace time of 5 s, and the list of the limits that were reached."""
    reached = []
    limits = JobLimits(timeout=timeout, spent=spent, grace=5)
    return TimeLimits(limits, lambda *limit: reached.append(limit), now), reached


def test_earlier_attempts_use_part_of_the_time_limit():
    assert make_limits(None)[0].next_deadline() == NEVER
    limits, reached = make_limits(60, spent=20, now=100.0)
    assert limits.next_deadline() == 140.0
    limits.on_time(139.9)
    assert reached == []
    limits.on_time(140.0)
    assert reached == [(Cause.TIME_LIMIT, "the time limit of 60 s is over")]
    limits.on_time(200.0)
    assert len(reached) == 1
    assert limits.next_deadline() == NEVER


def test_the_other_instances_have_the_grace_time_after_the_first_has_saved():
    limits, reached = make_limits(60)
    limits.on_checkpoint_end(3, 10.0)
    limits.on_checkpoint_end(1, 12.0)
    assert limits.next_deadline() == 15.0
    reason = "instance 3 ended at a checkpoint, but other instances did not"
    limits.on_time(15.0)
    assert reached == [(Cause.STRAGGLER, reason)]
    assert limits.next_deadline() == 60.0


def test_a_pause_counts_towards_no_limit():
    limits, reached = make_limits(60)
    limits.pause(50.0)
    limits.pause(55.0)  # already paused
    assert limits.next_deadline() == NEVER
    limits.on_time(70.0)
    assert reached == []
    limits.resume(80.0)
    limits.resume(81.0)  # not paused any more
    assert limits.paused_seconds == 30.0
    limits.on_time(89.9)
    assert reached == []
    limits.on_time(90.0)
    assert reached == [(Cause.TIME_LIMIT, "the time limit of 60 s is over")]


def test_the_time_limit_comes_first_if_the_grace_time_is_over_at_the_same_time():
    limits, reached = make_limits(15)
    limits.on_checkpoint_end(0, 10.0)
    limits.on_time(15.0)
    assert [cause for cause, _ in reached] == [Cause.TIME_LIMIT]
