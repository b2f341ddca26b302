"""What stops a job that goes on too long."""

from __future__ import annotations

from poprun_py.running.supervise.job import Cause
from poprun_py.running.supervise.time_limits import Limits

NEVER = float("inf")


def test_of_the_time_limit_earlier_runs_have_used_some():
    limits = Limits(5)
    assert limits.next_deadline() == NEVER
    limits.begin(100.0, 60, 20)
    assert limits.next_deadline() == 140.0
    assert limits.on_time(139.9) is None
    assert limits.on_time(140.0) == (Cause.TIME_LIMIT, "the time limit of 60 s is over")
    assert limits.on_time(200.0) is None
    assert limits.next_deadline() == NEVER


def test_instances_have_the_grace_time_to_follow_the_first_that_saved():
    limits = Limits(5)
    limits.begin(0.0, 60, 0)
    limits.saved(3, 10.0)
    limits.saved(1, 12.0)
    assert limits.next_deadline() == 15.0
    reason = "instance 3 ended at a checkpoint, others did not"
    assert limits.on_time(15.0) == (Cause.STRAGGLER, reason)
    assert limits.next_deadline() == 60.0


def test_no_limit_is_reached_while_time_does_not_count():
    limits = Limits(5)
    limits.begin(0.0, 60, 0)
    limits.pause(50.0)
    limits.pause(55.0)  # already paused
    assert limits.next_deadline() == NEVER
    assert limits.on_time(70.0) is None
    assert limits.resume(80.0) == 30.0
    assert limits.resume(81.0) == 0.0
    assert limits.on_time(89.9) is None
    assert limits.on_time(90.0) == (Cause.TIME_LIMIT, "the time limit of 60 s is over")
