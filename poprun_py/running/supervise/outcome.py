"""From everything that was seen of a run to its result: pure.

It decides which instance failed first, and which exit code the job has.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from popdist_py.environment import RESUME_EXIT_CODE
from popdist_py.errors import counted
from poprun_py.display.texts import printable
from poprun_py.errors import PROCESSES_ADVICE, StartError
from poprun_py.running.supervise.control_channel import Peer
from poprun_py.running.supervise.job import (
    HANG_EXIT_CODE,
    Cause,
    Collective,
    InstanceResult,
    Job,
    LaunchResult,
    Progress,
    Stop,
    describe,
)

# How many of the processes that an instance left are named.
_MOST_LEFT = 4
# How many characters of mpirun's output are shown; the log (-v) has all of it.
_MOST_SAID = 500
# mpirun's messages about instances that have ended, or that it ends.
_OF_ENDS = re.compile(
    r"MPI_ABORT was invoked|has exited due to process rank|noticed that process rank"
    r"|BAD TERMINATION|APPLICATION TERMINATED|detected that one or more processes exited"
)

# What Open MPI writes when it cannot make the folder of its own files.
_NO_FOLDER = "unable to create the desired directory"
# What a wrapper says that was refused another process.
_NO_PROCESS = os.strerror(errno.EAGAIN)
# Open MPI's message about an instance that ended with 0 but without MPI_Finalize.
_IMPROPER = re.compile(r"process rank (\d+) with PID \d+ on\s+node \S+\s+exiting\s+improperly")
# What Open MPI 5 writes of a daemon that it cannot reach any more, or whose ssh has ended.
_LOST_HOST = re.compile(r"^\s*Remote (?:host: +|daemon: \[\S*\] on node )(\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What was seen of a run when everything had ended.

    ``files`` is where MPI's files lay; ``had_no_room``: an instance or mpirun failed while that was
    full; ``had_no_shared_memory``: an instance got SIGBUS while /dev/shm was.
    ``processes_refused``: somebody in the launcher's control group was refused another process, and
    ``most_processes`` is how many it allows.
    """

    job: Job
    files: Path
    had_no_room: bool = False
    had_no_shared_memory: bool = False
    processes_refused: bool = False
    most_processes: int = 0
    peers: Mapping[int, Peer]
    last_words: frozenset[int]
    seconds: float
    mpirun_code: int
    mpirun_text: str
    stop: Stop | None = None


def judge(end: Ending) -> LaunchResult:
    """Return the result of a run.

    Raises:
        StartError: The programs of some instances never started.
    """
    stop = end.stop
    if stop is not None and stop.cause is Cause.REFUSED:
        raise StartError(stop.reason)
    results = tuple(_instance_result(end, index) for index in range(end.job.num_instances))
    failures = sorted((r for r in results if r.failed), key=lambda r: r.ended_ns)
    code, first = _exit_code(end, results, failures)
    result = LaunchResult(
        exit_code=code,
        instances=results,
        first_failure=first,
        seconds=end.seconds,
        may_restart=code not in (0, RESUME_EXIT_CODE),
    )
    if stop is not None and stop.cause is Cause.MPIRUN_ENDED:
        stop = replace(stop, reason=stop.reason + _why_mpirun_ended(end, results))
    advice = _advice(end)
    if not advice and first is not None and not first.was_lost:
        advice = _explanation_of(end.mpirun_text)
    return result if stop is None else _with_stop(result, stop, advice)


def _explanation_of(mpirun_text: str) -> str:
    """Return mpirun's output about a failure, such as one of MPI_Comm_spawn, in one line.

    Its messages about the ends of instances are left out: the report describes these better.
    """
    printed = printable(mpirun_text, keep="\n", replacement=" ")
    blocks = re.split(r"^-{20,}$", printed, flags=re.MULTILINE)
    told = [" ".join(block.split()) for block in blocks if not _OF_ENDS.search(block)]
    text = " ".join(filter(None, told))
    if not text:
        return ""
    return f"mpirun said: {text if len(text) <= _MOST_SAID else f'{text[:_MOST_SAID]}...'}"


def left_sentence(index: int, killed: Sequence[tuple[int, str]]) -> str:
    """Return a sentence that names the killed processes that an instance left at a good end."""
    named = [f"PID {pid} ({command})" for pid, command in killed[:_MOST_LEFT]]
    if len(killed) > _MOST_LEFT:
        named.append(f"{len(killed) - _MOST_LEFT} more")
    return (
        f"instance {index} had ended, and what it had started still ran after the grace time "
        f"(--grace): killed {', '.join(named)}"
    )


def _why_mpirun_ended(end: Ending, results: tuple[InstanceResult, ...]) -> str:
    """Return why mpirun ended the job, as the end of a sentence; empty if it gave no reason."""
    if lost := _LOST_HOST.search(end.mpirun_text):
        return f": it lost its connection with host {lost[1]}"
    improper = _IMPROPER.search(end.mpirun_text)
    index = int(improper[1]) if improper else -1
    if 0 <= index < len(results) and results[index].code == 0:
        return (
            f": instance {index} ended with exit code 0 but without MPI_Finalize, so that MPI "
            "counts it as failed. Let it end by sys.exit(), not os._exit(), or call MPI_Finalize"
        )
    return ""


def _with_stop(result: LaunchResult, stop: Stop, advice: str) -> LaunchResult:
    """Add why the job was stopped. One that can go on from a checkpoint has not hung."""
    is_told = stop.cause in (Cause.MPIRUN_ENDED, Cause.FAILED)
    is_saved = result.exit_code == RESUME_EXIT_CODE
    is_over = stop.cause is Cause.TIME_LIMIT
    return replace(
        result,
        cause=stop.cause,
        reason=stop.reason,
        advice=advice if is_told else "",
        timed_out=is_over and not is_saved,
        hung=() if is_saved else stop.hung,
        stacks=stop.stacks,
        may_restart=result.may_restart and not is_over and not stop.signal,
    )


def _exit_code(
    end: Ending, results: tuple[InstanceResult, ...], failures: list[InstanceResult]
) -> tuple[int, InstanceResult | None]:
    """Return the exit code and the instance that it comes from, if it does from one."""
    codes = {result.code for result in results}
    if RESUME_EXIT_CODE in codes and codes <= {0, RESUME_EXIT_CODE}:
        return RESUME_EXIT_CODE, None
    match end.stop:
        case Stop(cause=Cause.TIME_LIMIT | Cause.HANG):
            return HANG_EXIT_CODE, None
        case Stop(cause=Cause.SIGNAL, signal=number):
            return 128 + number, None
        case Stop(cause=Cause.MPIRUN_ENDED, signal=number) if number:
            return 128 + number, None
    if failures:
        _refuse_unstarted(end, failures[0].index)
    is_complete = len(end.peers) == len(results)
    # No program starts before all wrappers are there. A wrapper that ends before that has not
    # failed itself: mpirun kills it because another one is missing.
    if failures and (is_complete or end.peers[failures[0].index].started):
        return failures[0].exit_code, failures[0]
    if not is_complete:
        raise StartError(_start_failure(end))
    if codes == {0} and not any(result.was_stopped for result in results):
        return 0, None
    # No instance failed by itself: mpirun was killed, or an instance never reported. One that was
    # stopped has not done its work, though it ends with 0 at the stop.
    code = end.mpirun_code or 1
    return (code if code > 0 else 128 - code), None


def _refuse_unstarted(end: Ending, index: int) -> None:
    """Refuse the launch if the program of the instance that failed first was never executed.

    Raises:
        StartError: It was not; with the reason.
    """
    peer = end.peers[index]
    error = peer.outcome.get("exec_error") if peer.outcome else ""
    if error:
        advice = f": {_too_many(end)}" if error.endswith(_NO_PROCESS) else ""
        raise StartError(f"instance {index} on {peer.host} cannot run {error}{advice}")
    if not peer.started and end.processes_refused:
        # mpirun could not start all wrappers, and killed those that it had started.
        raise StartError(_start_failure(end))


def _instance_result(end: Ending, index: int) -> InstanceResult:
    peer = end.peers.get(index)
    if peer is None or peer.outcome is None:
        return InstanceResult(index=index)
    report = peer.outcome
    return InstanceResult(
        index=index,
        host=peer.host,
        pid=peer.started.get("pid", 0),
        code=report["code"],
        ended_ns=report["time_ns"] + peer.clock_offset_ns,
        progress=Progress(*progress) if (progress := report.get("progress")) else None,
        collective=Collective.of(call) if (call := report.get("call")) else None,
        max_rss_bytes=report.get("max_rss_bytes", 0),
        memory_limit_bytes=report.get("memory_limit_bytes"),
        oom_kills=report.get("oom_kills", 0),
        was_stopped=report.get("stopped", False),
        was_lost=report.get("lost", False),
        trained_alone=report.get("trained_alone", False),
        had_last_word=index in end.last_words,
        stderr_tail=peer.tail.decode(errors="replace"),
    )


def _start_failure(end: Ending) -> str:
    """Return one line for a job whose instances did not all appear."""
    said = [line.strip() for line in end.mpirun_text.splitlines() if line.strip(" -")]
    explanation = " ".join(said)[:500].rstrip(".") if said else "it said nothing"
    explained = ". ".join(filter(None, (explanation, _advice(end))))
    name = Path(end.job.command.words[0]).name
    if end.processes_refused:  # mpirun's words do not tell
        explained = _too_many(end)
    return (
        f"{len(end.peers)} of {counted(end.job.num_instances, 'instance')} started, then {name} "
        f"ended with {describe(end.mpirun_code)}: {explained}"
    )


def _advice(end: Ending) -> str:
    """Return what to do where the way in which it ended tells it; empty if it does not."""
    if end.processes_refused:
        return _too_many(end)
    # Writing to mapped memory of a file system that is full ends with SIGBUS.
    if end.had_no_shared_memory:
        return (
            "/dev/shm is full, through which MPI passes messages within a host: make it larger "
            "(docker run --shm-size=1g, mount -o remount,size=1g /dev/shm), or find what fills it"
        )
    if end.mpirun_code == -signal.SIGXFSZ:
        return "MPI's own files are larger than the limit of a file's size: raise it (ulimit -f)"
    has_no_folder = end.mpirun_code == -signal.SIGBUS or _NO_FOLDER in end.mpirun_text
    if not (has_no_folder or end.had_no_room):
        return ""
    return (
        f"MPI keeps files of its own in {end.files}, which has to be writable and have some "
        "room: set TMPDIR to another folder, or make room there"
    )


def _too_many(end: Ending) -> str:
    """Return what to do about a limit of processes that was reached."""
    if not end.processes_refused:
        return PROCESSES_ADVICE
    number = f"{end.most_processes} " if end.most_processes else ""
    return f"the limit of {number}processes and threads was reached: {PROCESSES_ADVICE}"
