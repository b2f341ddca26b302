"""The result of a job: who failed first, and which exit code that gives."""

from __future__ import annotations

import pytest

from poprun_py.errors import StartError
from poprun_py.output.screen import make_stream
from poprun_py.supervision.control_channel import Peer
from poprun_py.supervision.job import Job
from poprun_py.supervision.outcome import Ending, judge


def peer(index, code, at, offset=0, stopped=False):
    stream = make_stream(index, "stdout")
    return Peer(
        index=index, channel=None, host="h", pid=1, stdout=stream, stderr=stream,
        clock_offset_ns=offset, outcome={"code": code, "time_ns": at, "stopped": stopped},
    )  # fmt: skip


def judged(*peers, **fields):
    job = Job(command=("mpirun",), variables=({},) * len(peers), environ={})
    seen = {
        "job": job, "peers": {p.index: p for p in peers}, "last_word": None, "seconds": 1.0,
        "reason": "", "ended_by": 0, "timed_out": False, "hung": (), "stacks": (),
        "mpirun_code": 0, "mpirun_text": "",
    }  # fmt: skip
    return judge(Ending(**{**seen, **fields}))


def test_a_job_that_was_kept_from_starting_has_no_other_result():
    with pytest.raises(StartError, match=r"^host b: it does not answer$"):
        judged(peer(0, 1, at=1), refusal="host b: it does not answer")


def test_first_is_who_ended_first_by_this_hosts_clock():
    result = judged(peer(0, 1, at=100), peer(1, -9, at=50), peer(2, 3, at=10, offset=80))
    assert (result.exit_code, result.first_failure.index) == (137, 1)
    assert result.may_restart


def test_stopped_instances_did_not_fail():
    result = judged(peer(0, -15, at=1, stopped=True), peer(1, 3, at=2))
    assert (result.exit_code, result.first_failure.index) == (3, 1)


@pytest.mark.parametrize(
    ("peers", "fields", "code"),
    [
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {}, 0),
        ((peer(0, 75, at=1), peer(1, 0, at=1)), {"ended_by": 15}, 75),
        ((peer(0, 75, at=1), peer(1, 3, at=2)), {}, 3),
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {"ended_by": 15}, 143),
        ((peer(0, -15, at=1, stopped=True),), {"timed_out": True}, 124),
        ((peer(0, -15, at=1, stopped=True),), {"hung": (0,)}, 124),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": -9}, 137),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": 0}, 1),
    ],
)
def test_exit_code(peers, fields, code):
    assert judged(*peers, **fields).exit_code == code


def test_instances_that_never_came_are_a_launch_that_could_not_start():
    job = Job(command=("mpirun",), variables=({}, {}), environ={})
    with pytest.raises(StartError, match="1 of 2 instances started, then mpirun ended with exit"):
        judged(peer(0, 0, at=1), job=job, mpirun_code=1)
