"""The result of a job, with its exit code, first failure and advice."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

import pytest
from support.launcher.jobs import a_job

from poprun_py.errors import StartError
from poprun_py.launching import launch
from poprun_py.launching.failure_report import report_text
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.launch_result import Cause, Stop
from poprun_py.running.supervise.outcome import (
    Ending,
    ResourceShortage,
    launch_result,
    leftovers_sentence,
)


def peer(index, code, at, offset=0, stopped=False):
    return Peer(
        index=index, connection=None, host="h", pid=1, clock_offset_ns=offset,
        instance_end={"code": code, "time_ns": at, "stopped": stopped},
    )  # fmt: skip


def judged(*peers, **fields):
    job = a_job(count=len(peers))
    seen = {
        "job": job, "peers": {p.index: p for p in peers}, "visible_instances": frozenset(),
        "seconds": 1.0, "mpirun_code": 0, "mpirun_output": "", "files": Path("/tmp"),
    }  # fmt: skip
    return launch_result(Ending(**{**seen, **fields}))


def test_a_job_whose_instances_all_trained_alone_gets_a_warning():
    def warned(*alone, code=0):
        peers = [peer(index, code, at=1) for index in range(len(alone))]
        for each, is_alone in zip(peers, alone, strict=True):
            each.instance_end["trained_alone"] = is_alone
        return launch._separate_models(judged(*peers))

    assert "each of the 2 instances has trained a separate model" in warned(True, True)
    assert warned(True) == warned(True, False) == warned(False, False) == ""
    assert warned(True, True, code=3) == ""


def stop(cause, **fields):
    return {"stop": Stop(**{"cause": cause, "reason": "a reason", "at": 1.0, **fields})}


SIGTERM = stop(Cause.SIGNAL, signal=15)
MPIRUN_SIGTERM = stop(Cause.MPIRUN_ENDED, signal=15)
TIME_LIMIT = stop(Cause.TIME_LIMIT)
HANG = stop(Cause.HANG, hung=(0,))


def test_a_refused_job_raises_its_reason():
    with pytest.raises(StartError, match=r"^host b: it does not answer$"):
        judged(peer(0, 1, at=1), **stop(Cause.REFUSED, reason="host b: it does not answer"))


def test_the_first_failure_is_the_earliest_by_the_clock_of_this_host():
    result = judged(peer(0, 1, at=100), peer(1, -9, at=50), peer(2, 3, at=10, offset=80))
    assert (result.exit_code, result.first_failure.index) == (137, 1)
    assert result.may_restart


def test_an_instance_that_lost_another_one_did_not_fail_first():
    def lost(index, at, told="instance 1 has left the group\n"):
        found = peer(index, 1, at=at)
        found.tail += f"  at call\npopdist_py.errors.InstanceLostError: {told}".encode()
        return found

    result = judged(lost(0, at=10), peer(1, 9, at=50), lost(2, at=5))
    assert (result.exit_code, result.first_failure.index) == (9, 1)
    assert judged(lost(0, at=10), lost(1, at=5)).first_failure.index == 1
    handled = lost(0, at=10, told="x\ncannot save\n")  # the error is not the last line
    assert judged(handled, peer(1, 9, at=50)).first_failure.index == 0


def test_stopped_instances_did_not_fail():
    result = judged(peer(0, -15, at=1, stopped=True), peer(1, 3, at=2))
    assert (result.exit_code, result.first_failure.index) == (3, 1)


@pytest.mark.parametrize(
    ("peers", "fields", "code"),
    [
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {}, 0),
        ((peer(0, 75, at=1), peer(1, 0, at=1)), SIGTERM, 75),
        ((peer(0, 75, at=1), peer(1, 3, at=2)), {}, 3),
        ((peer(0, 0, at=1), peer(1, 0, at=1)), SIGTERM, 143),
        ((peer(0, -15, at=1, stopped=True),), TIME_LIMIT, 124),
        ((peer(0, -15, at=1, stopped=True),), HANG, 124),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": -9}, 137),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": 0}, 1),
        ((peer(0, 0, at=1, stopped=True), peer(1, 0, at=1)), {"mpirun_code": -9}, 137),
        ((peer(0, 0, at=1, stopped=True),), {}, 1),
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {"mpirun_code": -9}, 0),
        ((peer(0, -15, at=1), peer(1, -15, at=2, stopped=True)), MPIRUN_SIGTERM, 143),
    ],
)
def test_exit_code(peers, fields, code):
    assert judged(*peers, **fields).exit_code == code


def test_a_job_with_missing_instances_could_not_start():
    job = a_job(count=2)
    with pytest.raises(StartError, match="1 of 2 instances started, then mpirun ended with exit"):
        judged(peer(0, 0, at=1), job=job, mpirun_code=1)


def test_advice_names_a_folder_that_mpi_cannot_use():
    seen = {
        "job": a_job(count=2), "files": Path("/full"),
    }  # fmt: skip
    said = "PMIx was unable to create the desired directory: Read-only file system."
    advice = r"MPI needs space for its own files in /full: .* set TMPDIR to another folder"
    with pytest.raises(StartError, match=rf"file system\. {advice}"):
        judged(peer(0, 0, at=1), **seen, mpirun_code=213, mpirun_output=said)
    ended = stop(Cause.MPIRUN_ENDED, reason="mpirun ended with signal SIGBUS")
    stopped = peer(0, -15, at=1, stopped=True), peer(1, -15, at=1, stopped=True)
    result = judged(*stopped, **seen, mpirun_code=-signal.SIGBUS, **ended)
    assert re.fullmatch(rf"mpirun ended with signal SIGBUS\. {advice}.*", result.explanation)
    limited = judged(*stopped, **seen, mpirun_code=-signal.SIGXFSZ, **ended)
    assert limited.advice.endswith("the limit of the file size: raise the limit (ulimit -f)")
    other = judged(*stopped, **seen, mpirun_code=-signal.SIGKILL, **ended)
    assert other.explanation == "mpirun ended with signal SIGBUS"
    failed = judged(
        peer(0, 14, at=1),
        peer(1, 0, at=1),
        **seen,
        shortage=ResourceShortage(is_disk_full=True),
        **stop(Cause.FAILED),
    )
    assert re.match(advice, failed.advice)
    assert re.search(rf"failed first: exit code 14\n.*\n  {advice}", report_text(failed, str))
    seen = {
        **seen,
        "job": a_job(),
        "shortage": ResourceShortage(is_shared_memory_full=True),
        **stop(Cause.FAILED),
    }
    failed = judged(peer(0, -7, at=1), **seen)
    assert failed.advice.startswith("/dev/shm is full, but MPI passes messages")


def test_advice_names_a_limit_of_processes_that_was_reached():
    job = a_job(count=2)
    seen = {"job": job, "mpirun_code": 185, "mpirun_output": "PRTE ERROR: Unknown error"}
    refused = {"shortage": ResourceShortage(was_process_refused=True, process_limit=5)}
    cause = "the limit of 5 processes and threads was reached: raise the limit of processes"
    with pytest.raises(StartError, match=f"1 of 2 instances started, .* exit code 185: {cause}"):
        judged(peer(0, 0, at=1), **seen, **refused)
    # Another wrapper could not start. This one was killed before its program started.
    with pytest.raises(StartError, match=cause):
        judged(peer(0, -9, at=1), **seen, **refused, **stop(Cause.FAILED))
    # A wrapper that is killed because another one did not start is not the first failure.
    with pytest.raises(StartError, match=r"1 of 2 .* exit code 185: PRTE ERROR: Unknown error$"):
        judged(peer(0, -9, at=1), **seen, **stop(Cause.FAILED))
    ran = peer(0, 1, at=1)
    ran.started["pid"] = 7
    assert cause in judged(ran, **seen, **refused, **stop(Cause.FAILED)).advice
    unable = peer(0, 126, at=1)
    unable.instance_end["exec_error"] = f"python: {os.strerror(errno.EAGAIN)}"
    with pytest.raises(StartError, match=r"cannot run python: Resource .*: raise the limit"):
        judged(unable, **seen)


@pytest.mark.parametrize(
    "said",
    [
        "PRTE has lost communication with a remote daemon.\n\n"
        "  HNP daemon   : [prterun-node0-7@0,0] on node node0\n"
        "  Remote daemon: [prterun-node0-7@0,1] on node node1\n",
        "A daemon failed to report back after being spawned.\n"
        "  Local host:    node0\n  Remote host:   node1\n  Daemon exit status: 255\n",
    ],
)
def test_a_host_that_mpirun_lost_is_named(said):
    ended = stop(Cause.MPIRUN_ENDED, reason="mpirun ended with exit code 0")
    result = judged(peer(0, -15, at=1, stopped=True), mpirun_code=0, mpirun_output=said, **ended)
    assert result.exit_code == 1
    assert result.explanation == (
        "mpirun ended with exit code 0: mpirun lost its connection to host node1"
    )


@pytest.mark.parametrize(
    ("fields", "timed_out", "hung", "may_restart"),
    [
        (TIME_LIMIT, True, (), False),
        (HANG, False, (0,), True),
        (stop(Cause.HANG, hung=(0,), signal=2), False, (0,), False),
        (SIGTERM, False, (), False),
        (stop(Cause.FAILED), False, (), True),
    ],
)
def test_the_result_has_the_cause_of_a_stop(fields, timed_out, hung, may_restart):
    result = judged(peer(0, -15, at=1, stopped=True), **fields)
    assert (result.timed_out, result.hung, result.may_restart) == (timed_out, hung, may_restart)
    assert result.reason == "a reason"


def test_instances_that_ended_at_a_checkpoint_have_not_hung():
    result = judged(peer(0, 75, at=1), **HANG)
    assert (result.exit_code, result.hung, result.timed_out) == (75, (), False)


def test_the_most_severe_cause_counts_or_the_first_of_equals():
    failed, signalled = stop(Cause.FAILED)["stop"], SIGTERM["stop"]
    hang, limit = stop(Cause.HANG, at=2.0)["stop"], TIME_LIMIT["stop"]
    assert failed.followed_by(signalled) == signalled
    assert signalled.followed_by(failed) == signalled
    both = signalled.followed_by(hang)
    assert (both.cause, both.signal, both.at) == (Cause.HANG, 15, 1.0)
    assert hang.followed_by(limit).cause is Cause.HANG
    assert limit.followed_by(hang).cause is Cause.TIME_LIMIT
    assert hang.followed_by(signalled).signal == 15
    assert hang.followed_by(stop(Cause.REFUSED)["stop"]).cause is Cause.REFUSED


def test_a_signal_to_mpirun_is_the_cause_of_later_failures():
    fields = stop(Cause.MPIRUN_ENDED, signal=15, reason="mpirun was ended by SIGTERM")
    result = judged(peer(0, -15, at=1), peer(1, -15, at=2, stopped=True), **fields)
    assert result.first_failure is None
    assert not result.may_restart
    label = "instance {}".format
    assert report_text(result, label) == "poprun-py: error: mpirun was ended by SIGTERM\n"


def test_instances_that_were_killed_after_ctrl_c_are_named():
    fields = stop(Cause.SIGNAL, signal=2, reason="SIGINT received")
    saved, killed = peer(0, 0, at=1), peer(1, -9, at=2, stopped=True)
    result = judged(saved, killed, **fields)
    label = "instance {}".format
    assert report_text(result, label) == "poprun-py: instance 1 was still running, and was killed\n"
    assert report_text(judged(saved, **fields), label) == ""


def test_leftover_processes_are_named():
    killed = [(100 + n, "rsync -a out there") for n in range(6)]
    assert leftovers_sentence(1, killed[:1]) == (
        "instance 1 ended, but processes that it had started were still running after the grace "
        "time (--grace). The launcher killed PID 100 (rsync -a out there)"
    )
    assert leftovers_sentence(1, killed).endswith("PID 103 (rsync -a out there), 2 more")


@pytest.mark.parametrize(
    "said",
    [
        "prterun has exited due to process rank 0 with PID 8663 on node vm exiting\nimproperly.",
        "mpirun has exited due to process rank 0 with PID 0 on\nnode vm exiting improperly.",
    ],
)
def test_an_instance_without_mpi_finalize_is_named(said):
    fields = stop(Cause.MPIRUN_ENDED, reason="mpirun ended with exit code 1")
    peers = peer(0, 0, at=1), peer(1, -15, at=2, stopped=True)
    result = judged(*peers, **fields, mpirun_code=1, mpirun_output=said)
    assert result.exit_code == 1
    assert result.reason.startswith(
        "mpirun ended with exit code 1: instance 0 ended with exit code 0 but without MPI_Finalize"
    )


SPAWN = """
--------------------------------------------------------------------------
prterun was unable to find the specified executable file, and therefore did
not launch the job.

   Node:       vm
   Executable: no-such-program
--------------------------------------------------------------------------
"""
ABORT = """
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
--------------------------------------------------------------------------
\0 """


@pytest.mark.parametrize("said", [SPAWN, SPAWN + ABORT])
def test_the_report_has_the_output_of_mpirun_about_a_failure(said):
    failed = stop(Cause.FAILED, reason="instance 0 ended with exit code 1")
    report = report_text(
        judged(peer(0, 1, at=1), **failed, mpirun_output=said), "instance {}".format
    )
    assert report.splitlines()[-1] == (
        "  mpirun said: prterun was unable to find the specified executable file, and therefore "
        "did not launch the job. Node: vm Executable: no-such-program"
    )


def test_the_report_omits_the_output_of_mpirun_about_ends():
    failed = stop(Cause.FAILED, reason="instance 0 ended with exit code 1")
    assert judged(peer(0, 1, at=1), **failed, mpirun_output=ABORT).advice == ""
