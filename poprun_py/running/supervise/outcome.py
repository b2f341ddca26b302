"""The result of a run, with its exit code, first failure, advice and resource shortages."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from popdist_py.environment import RESUME_EXIT_CODE
from popdist_py.errors import counted
from poprun_py.display.formatting import printable
from poprun_py.errors import PROCESSES_ADVICE, StartError
from poprun_py.process_info import process_refusals_and_limit
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import (
    HANG_EXIT_CODE,
    Cause,
    Collective,
    InstanceResult,
    LaunchResult,
    Progress,
    Stop,
    describe,
)

_SHARED_MEMORY = Path("/dev/shm")
# A file system counts as full if fewer than _MIN_FREE_BYTES are free. MPI needs some megabytes for
# a job, and a program that fills a disk may leave a few bytes unused.
_MIN_FREE_BYTES = 1 << 20
# The maximum number of processes in a message about processes that an instance left running.
_MAX_LEFTOVERS = 4
# The maximum number of characters of mpirun's output to show. The log (-v) has the whole output.
_MAX_MPIRUN_LENGTH = 500
# mpirun's messages about instances that have ended or that mpirun is ending.
_OF_ENDS = re.compile(
    r"MPI_ABORT was invoked|has exited due to process rank|noticed that process rank"
    r"|BAD TERMINATION|APPLICATION TERMINATED|detected that one or more processes exited"
)

# Open MPI's message if it cannot make the folder for its own files.
_NO_FOLDER = "unable to create the desired directory"
# The end of a wrapper's message if the kernel refused to start a process.
_NO_PROCESS = os.strerror(errno.EAGAIN)
# Open MPI's message about an instance that ended with exit code 0 but without MPI_Finalize.
_IMPROPER = re.compile(r"process rank (\d+) with PID \d+ on\s+node \S+\s+exiting\s+improperly")
# Open MPI 5's message about a host whose MPI daemon, or the daemon's ssh process, was lost.
_LOST_HOST = re.compile(r"^\s*Remote (?:host: +|daemon: \[\S*\] on node )(\S+)$", re.MULTILINE)
# The last line of the traceback of a program that ended because another instance was lost.
_LOST_ANOTHER = re.compile(r"^popdist_py\.errors\.InstanceLostError: .*\s*\Z", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceShortage:
    """The resources of this host that were used up when an instance or mpirun failed."""

    is_disk_full: bool = False  # whether the file system of MPI's files is full
    is_shared_memory_full: bool = False  # whether /dev/shm is full after a SIGBUS
    was_process_refused: bool = False  # whether the control group refused a process
    process_limit: int = 0  # the control group's limit of processes; 0 if unknown


class ShortageCheck:
    """Finds resource shortages during one attempt at a job; created when the attempt starts."""

    def __init__(self, mpi_folder: Path) -> None:
        self._folder = mpi_folder
        self._found = ResourceShortage()
        self._refused_before = process_refusals_and_limit()[0]

    def on_failure(self, code: int) -> None:
        """Look for full file systems after the first failure on this host, with exit ``code``."""
        self._found = ResourceShortage(
            is_disk_full=is_full(self._folder),
            is_shared_memory_full=code == -signal.SIGBUS and is_full(_SHARED_MEMORY),
        )

    def result(self, *, has_mpirun_failed: bool, was_stopped: bool) -> ResourceShortage:
        """Return the resource shortages that were found during a job that has ended."""
        found = self._found
        if has_mpirun_failed and not found.is_disk_full:
            # The output of an mpirun that cannot start does not name the full folder, so the folder
            # with MPI's files is checked.
            found = replace(found, is_disk_full=is_full(self._folder))
        if not (has_mpirun_failed or was_stopped):
            return found
        refused, limit = process_refusals_and_limit()
        was_refused = refused > self._refused_before
        return replace(found, was_process_refused=was_refused, process_limit=limit or 0)


def is_full(folder: Path) -> bool:
    """Whether the file system of ``folder`` is full, or has become read-only."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    # File systems without limits report totals of 0.
    has_no_names = status.f_files > 0 and status.f_favail == 0
    has_no_bytes = status.f_blocks > 0 and status.f_bavail * status.f_frsize < _MIN_FREE_BYTES
    return has_no_names or has_no_bytes or bool(status.f_flag & os.ST_RDONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The facts about an ended run from which its result is made.

    Attributes:
        files: The folder in which MPI keeps its own files.
        peers: The instances whose wrappers have connected to the launcher.
        visible_instances: The instances whose last lines are at the end of the launcher's stderr.
        mpirun_code: The exit code of mpirun; negative if a signal ended mpirun.
    """

    job: Job
    files: Path
    shortage: ResourceShortage = field(default_factory=ResourceShortage)
    peers: Mapping[int, Peer]
    visible_instances: frozenset[int]
    seconds: float
    mpirun_code: int
    mpirun_output: str
    stop: Stop | None = None


def launch_result(end: Ending) -> LaunchResult:
    """Return the result of a run.

    Raises:
        StartError: The programs of some instances never started.
    """
    stop = end.stop
    if stop is not None and stop.cause is Cause.REFUSED:
        raise StartError(stop.reason)
    results = tuple(_instance_result(end, index) for index in range(end.job.num_instances))
    failures = sorted((r for r in results if r.failed), key=_order_of_failure)
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
    if stop is not None and stop.cause is Cause.HOSTS and code == 0:
        return result  # the programs ended by themselves before they could use new hosts
    advice = _advice(end)
    if not advice and first is not None and not first.was_lost:
        advice = _explanation_of(end.mpirun_output)
    return result if stop is None else _with_stop(result, stop, advice)


def _order_of_failure(result: InstanceResult) -> tuple[bool, int]:
    """Return the sort key of an instance that failed.

    A program leaves its group before its process ends. An instance that fails because of this can
    end earlier, although it did not fail first.
    """
    return _LOST_ANOTHER.search(result.stderr_tail) is not None, result.ended_ns


def _explanation_of(mpirun_output: str) -> str:
    """Return mpirun's messages about a failure, such as a failed MPI_Comm_spawn, in one line.

    The result omits messages about ends of instances, which the launcher's report describes.
    """
    printed = printable(mpirun_output, keep="\n", replacement=" ")
    blocks = re.split(r"^-{20,}$", printed, flags=re.MULTILINE)
    messages = [" ".join(block.split()) for block in blocks if not _OF_ENDS.search(block)]
    text = " ".join(filter(None, messages))
    if not text:
        return ""
    if len(text) > _MAX_MPIRUN_LENGTH:
        text = f"{text[:_MAX_MPIRUN_LENGTH]}..."
    return f"mpirun said: {text}"


def leftovers_sentence(index: int, killed: Sequence[tuple[int, str]]) -> str:
    """Return a sentence about processes that an instance left running at its end.

    ``killed`` has the process id and the command of each process that a wrapper has killed.
    """
    named = [f"PID {pid} ({command})" for pid, command in killed[:_MAX_LEFTOVERS]]
    if len(killed) > _MAX_LEFTOVERS:
        named.append(f"{len(killed) - _MAX_LEFTOVERS} more")
    return (
        f"instance {index} ended, but processes that it had started were still running after the "
        f"grace time (--grace). The launcher killed {', '.join(named)}"
    )


def _why_mpirun_ended(end: Ending, results: tuple[InstanceResult, ...]) -> str:
    """Return why mpirun ended the job, as the end of a sentence; empty without a reason."""
    if lost := _LOST_HOST.search(end.mpirun_output):
        return f": mpirun lost its connection to host {lost[1]}"
    improper = _IMPROPER.search(end.mpirun_output)
    index = int(improper[1]) if improper else -1
    if 0 <= index < len(results) and results[index].code == 0:
        return (
            f": instance {index} ended with exit code 0 but without MPI_Finalize, so MPI counts "
            "the instance as failed. End the program with sys.exit() instead of os._exit(), or "
            "call MPI_Finalize"
        )
    return ""


def _with_stop(result: LaunchResult, stop: Stop, advice: str) -> LaunchResult:
    """Add the cause of the stop to the result. A job that ended at a checkpoint is not hung."""
    needs_advice = stop.cause in (Cause.MPIRUN_ENDED, Cause.FAILED)
    is_saved = result.exit_code == RESUME_EXIT_CODE
    is_over = stop.cause is Cause.TIME_LIMIT
    return replace(
        result,
        cause=stop.cause,
        reason=stop.reason,
        advice=advice if needs_advice else "",
        timed_out=is_over and not is_saved,
        hung=() if is_saved else stop.hung,
        stacks=stop.stacks,
        may_restart=result.may_restart and not is_over and not stop.signal,
    )


def _exit_code(
    end: Ending, results: tuple[InstanceResult, ...], failures: list[InstanceResult]
) -> tuple[int, InstanceResult | None]:
    """Return the exit code of the job, and the instance that caused this exit code, or None."""
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
    # No program starts before all wrappers have connected. If a wrapper ends before its program
    # starts, mpirun has killed the wrapper because another wrapper is missing. The killed wrapper
    # does not count as the first failure.
    if failures and (is_complete or end.peers[failures[0].index].started):
        return failures[0].exit_code, failures[0]
    if not is_complete:
        raise StartError(_start_failure(end))
    if codes == {0} and not any(result.was_stopped for result in results):
        return 0, None
    # Either mpirun was killed, or an instance never reported its end, or instances were stopped. A
    # stopped instance has not finished its work, even if its exit code is 0.
    code = end.mpirun_code or 1
    return (code if code > 0 else 128 - code), None


def _refuse_unstarted(end: Ending, index: int) -> None:
    """Raise StartError if the program of instance ``index``, which failed first, never started."""
    peer = end.peers[index]
    error = peer.instance_end.get("exec_error") if peer.instance_end else ""
    if error:
        advice = f": {_too_many(end)}" if error.endswith(_NO_PROCESS) else ""
        raise StartError(f"instance {index} on {peer.host} cannot run {error}{advice}")
    if not peer.started and end.shortage.was_process_refused:
        # mpirun could not start all wrappers, and killed the wrappers that it had started.
        raise StartError(_start_failure(end))


def _instance_result(end: Ending, index: int) -> InstanceResult:
    peer = end.peers.get(index)
    if peer is None or peer.instance_end is None:
        return InstanceResult(index=index)
    report = peer.instance_end
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
        has_model=report.get("has_model", False),
        had_last_word=index in end.visible_instances,
        stderr_tail=peer.tail.decode(errors="replace"),
    )


def _start_failure(end: Ending) -> str:
    """Return an error message, in one line, for a job whose instances did not all connect."""
    lines = [line.strip() for line in end.mpirun_output.splitlines() if line.strip(" -")]
    explanation = " ".join(lines)[:500].rstrip(".") if lines else "there was no output"
    explained = ". ".join(filter(None, (explanation, _advice(end))))
    name = Path(end.job.command.words[0]).name
    if end.shortage.was_process_refused:  # mpirun's output does not mention the refusal
        explained = _too_many(end)
    return (
        f"{len(end.peers)} of {counted(end.job.num_instances, 'instance')} started, then {name} "
        f"ended with {describe(end.mpirun_code)}: {explained}"
    )


def _advice(end: Ending) -> str:
    """Return advice to the user about the failure of the job; empty without advice."""
    if end.shortage.was_process_refused:
        return _too_many(end)
    # A program that writes to mapped memory of a full file system gets SIGBUS.
    if end.shortage.is_shared_memory_full:
        return (
            "/dev/shm is full, but MPI passes messages within a host through /dev/shm: make "
            "/dev/shm larger (docker run --shm-size=1g, mount -o remount,size=1g /dev/shm), or "
            "remove files from it"
        )
    if end.mpirun_code == -signal.SIGXFSZ:
        return (
            "the files of MPI are larger than the limit of the file size: raise the limit (ulimit "
            "-f)"
        )
    has_no_folder = end.mpirun_code == -signal.SIGBUS or _NO_FOLDER in end.mpirun_output
    if not (has_no_folder or end.shortage.is_disk_full):
        return ""
    return (
        f"MPI needs space for its own files in {end.files}: make this folder writable and free "
        "some space in it, or set TMPDIR to another folder"
    )


def _too_many(end: Ending) -> str:
    if not end.shortage.was_process_refused:
        return PROCESSES_ADVICE
    number = f"{end.shortage.process_limit} " if end.shortage.process_limit else ""
    return f"the limit of {number}processes and threads was reached: {PROCESSES_ADVICE}"
