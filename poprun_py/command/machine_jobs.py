"""The jobs of this machine, found by the leases of CPUs and by the answers of launchers.

Leases tell about the jobs of all users. Launchers answer their own user and root only, and also
launchers without a lease answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from popdist_py.errors import counted
from poprun_py import process_info
from poprun_py.errors import UsageError, nearest, shown_word
from poprun_py.machines.lease_files import LeaseRecord, QueueRecord, Record
from poprun_py.machines.leases import user_name
from poprun_py.running.supervise.launcher_queries import LauncherAnswer, is_of_run
from poprun_py.terminal import print_warning

RUNNING, STARTING, WAITING, SUSPENDED = "running", "starting", "waiting", "suspended"
# The launcher holds CPUs, but runs no programs: it waits for IPUs, or pauses before a restart.
PREPARING: Final = "preparing"
SILENT: Final = "no answer"
# The launcher of the job is on another host, and has leased CPUs of this machine.
ELSEWHERE: Final = "from another host"
_MOST_NAMES = 8
_WRAPPER = "start_wrapper.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineJob:
    """A job of this machine.

    Attributes:
        run_id: The name of the run; empty if it is unknown.
        pid: The process id of the launcher.
        user: The name of the launcher's user.
        is_own: Whether this user may ask the launcher and stop it.
        since: When the job took its CPUs, or began to run or to wait, in seconds since the epoch.
        state: One of the states above; empty for a job of another user.
        program: The short name of the program.
        num_instances: The number of instances; None if it is unknown.
        cpus: The CPUs that the job has leased; empty without a lease.
        is_shared: Whether other jobs held some of these CPUs before.
        step: The highest training step of an instance; None if it is unknown.
        samples_per_second: The speed of all instances together; None if it is unknown.
        socket: The launcher's socket; None if the launcher has none, or belongs to another user.
        start_ticks: The start time of the launcher, in clock ticks since boot; 0 if unknown.
    """

    run_id: str
    pid: int
    user: str
    is_own: bool
    since: float
    state: str = ""
    program: str = ""
    num_instances: int | None = None
    cpus: tuple[int, ...] = ()
    is_shared: bool = False
    step: int | None = None
    samples_per_second: float | None = None
    socket: Path | None = None
    start_ticks: int = 0

    @property
    def title(self) -> str:
        """The name of the job in messages, such as ``lr-3 (launcher 4711)``."""
        return f"{self.run_id} (launcher {self.pid})" if self.run_id else f"launcher {self.pid}"


def jobs_of_machine() -> list[MachineJob]:
    """Return the jobs of this machine that this user can see, the oldest first.

    Raises:
        UsageError: POPRUN_LEASES does not name a folder.
    """
    from poprun_py.launching.job_cores import leases_place
    from poprun_py.machines.lease_files import problem_text
    from poprun_py.machines.leases import all_records
    from poprun_py.running.supervise.launcher_queries import all_answers

    place = leases_place()
    leases: tuple[LeaseRecord, ...] = ()
    queue: tuple[QueueRecord, ...] = ()
    try:
        leases, queue = all_records(place)
    except OSError as error:
        problem = problem_text(error, place or Path())
        print_warning(
            "jobs of other users cannot be listed, because the folder of CPU leases cannot be "
            f"read: {problem}"
        )
    return joined(leases, queue, all_answers(), now=time.time())


def joined(
    leases: Sequence[LeaseRecord],
    queue: Sequence[QueueRecord],
    answers: Sequence[LauncherAnswer],
    *,
    now: float,
) -> list[MachineJob]:
    """Return one job for each launcher, with what its lease and its answer tell.

    Args:
        leases: The leases of all users.
        queue: The jobs of all users that wait for CPUs.
        answers: The answers of this user's launchers.
        now: The time in seconds since the epoch.
    """
    found: list[Record] = [*queue, *leases]
    records = {each.job.pid: each for each in found}
    jobs = [_of_answer(each, records.pop(each.pid, None), now) for each in answers]
    # A job on several hosts may have leased CPUs of this host for another launcher.
    known = {each.run_id for each in jobs if each.run_id}
    for record in records.values():
        job = _of_record(record)
        if job.state != ELSEWHERE or job.run_id not in known:
            jobs.append(job)
    return sorted(jobs, key=lambda each: (each.since, each.pid))


def _of_answer(answer: LauncherAnswer, record: Record | None, now: float) -> MachineJob:
    status: dict[str, Any] = answer.status or {}
    owner = process_info.owner(answer.pid)
    instances = status.get("instances") or ()
    if answer.status is None:
        state = SUSPENDED if process_info.state_letter(answer.pid) in "Tt" else SILENT
    else:
        state = RUNNING if instances else STARTING
    steps = [each["step"] for each in instances if each.get("step") is not None]
    lease = record if isinstance(record, LeaseRecord) else None
    return MachineJob(
        run_id=status.get("run_id") or (record.job.run_id if record else ""),
        pid=answer.pid,
        user=user_name(str(os.geteuid() if owner is None else owner)),
        is_own=True,
        since=record.since if record else now - status.get("seconds", 0.0),
        state=state,
        program=status.get("program") or (record.job.program if record else ""),
        num_instances=len(instances) or None,
        cpus=lease.cpus if lease else (),
        is_shared=lease.is_shared if lease else False,
        step=max(steps, default=None),
        samples_per_second=status.get("samples_per_second") or None,
        socket=answer.path,
    )


def _of_record(record: Record) -> MachineJob:
    """Return a job of which only the lease or the place in the queue is known."""
    job, is_own = record.job, os.geteuid() in (0, _number(record.user))
    lease = record if isinstance(record, LeaseRecord) else None
    state = ""
    if lease is None:
        state = WAITING
    elif is_own:
        state = ELSEWHERE if _has_wrappers(job.pid) else PREPARING
    return MachineJob(
        run_id=job.run_id,
        pid=job.pid,
        user=user_name(record.user),
        is_own=is_own,
        since=record.since,
        state=state,
        program=job.program,
        cpus=lease.cpus if lease else (),
        is_shared=lease.is_shared if lease else False,
        # Any user can write a lease with any process id. Only the owner's process is signalled.
        start_ticks=job.process_start if process_info.owner(job.pid) == _number(record.user) else 0,
    )


def _number(user: str) -> int:
    return int(user) if user.isascii() and user.isdigit() else -1


def _has_wrappers(pid: int) -> bool:
    """Return whether a process is the parent of wrappers, as MPI's daemon on a host is."""
    children = process_info.children_by_parent().get(pid, ())
    return any(_WRAPPER in process_info.command_line(child) for child in children)


# --- the job that a user names --------------------------------------------------------------------


def find_job(word: str, jobs: Sequence[MachineJob]) -> MachineJob:
    """Return the job that ``word`` names: the process id of its launcher, or its run.

    Raises:
        UsageError: No job has this name, several jobs have it, or the job is another user's.
    """
    found = [job for job in jobs if word == str(job.pid) or is_of_run(job.run_id, word)]
    found = [job for job in found if job.is_own] or found
    if len(found) > 1:
        raise UsageError(
            f"{word}: {len(found)} jobs have this name: {', '.join(job.title for job in found)}; "
            "give the process id of one launcher instead of the name"
        )
    if not found:
        raise UsageError(f"{shown_word(word)}: {_no_job(word, jobs)}; {_known(jobs)}")
    job = found[0]
    if not job.is_own:
        users = "root" if job.user == "root" else f"{job.user} or root"
        raise UsageError(
            f"{job.title} is a job of the user {job.user}; only {users} can stop the job"
        )
    if job.state == ELSEWHERE:
        raise UsageError(f"{job.title} was launched on another host; stop the job on that host")
    return job


def _no_job(word: str, jobs: Sequence[MachineJob]) -> str:
    """Return why a word names no job."""
    pid = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else 0
    owner = process_info.owner(pid) if pid else None
    if owner is None:
        hint = nearest(word, (job.run_id for job in jobs if job.is_own))
        return f"no job of this name runs on this host{hint}"
    above = process_info.ancestors(pid)
    outer = next((job for each in above for job in jobs if job.pid == each), None)
    if outer is not None:
        return f"this process belongs to the job {outer.title}; give the name of that job"
    if owner != os.geteuid():
        return (
            f"this process belongs to the user {user_name(str(owner))}, and is not the launcher of "
            "a job"
        )
    return "this process is not the launcher of a job"


def _known(jobs: Sequence[MachineJob]) -> str:
    own = [job.title for job in jobs if job.is_own]
    if not own:
        return "none of your jobs runs on this host"
    more = f" and {counted(len(own) - _MOST_NAMES, 'more job')}" if len(own) > _MOST_NAMES else ""
    return f"your running jobs: {', '.join(own[:_MOST_NAMES])}{more}"
