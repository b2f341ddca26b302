"""Leases of this machine's CPUs, and the queue of jobs that wait for CPUs."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from poprun_py.machines.lease_files import (
    LEASE_PREFIX,
    MAX_NUMBER,
    QUEUE_PREFIX,
    HeldFile,
    JobProcess,
    LeaseFolder,
    LeaseRecord,
    QueueRecord,
)
from poprun_py.machines.lease_sharing import cpus_of
from poprun_py.process_info import read_stat

FOLDER_VARIABLE = "POPRUN_LEASES"
_NO_LEASES = "none"
_FOLDER_NAME = "poprun-py-leases"
# Lease files are in /dev/shm if possible, because files in memory are fast and disappear with a
# reboot. If /dev/shm is not writable, lease files are in /tmp.
_BASES = ("/dev/shm", "/tmp")
# If another job leases the chosen CPUs first, this job pauses for up to 0.05 s and chooses CPUs
# again, in at most 20 attempts.
_MAX_DECISIONS, _PAUSE_SECONDS = 20, 0.05

Decision = TypeVar("Decision")


def leases_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this machine's leases; None if POPRUN_LEASES turns leases off.

    Raises:
        ValueError: POPRUN_LEASES is neither ``none`` nor an absolute path.
    """
    given = environ.get(FOLDER_VARIABLE, "")
    if given.lower() == _NO_LEASES:
        return None
    if given:
        if not given.startswith("/") or "\0" in given:
            raise ValueError(
                f"{FOLDER_VARIABLE} {given!r}: expected the absolute path of a folder, or none"
            )
        return Path(given)
    base = next((base for base in _BASES if os.access(base, os.W_OK | os.X_OK)), _BASES[-1])
    return Path(base, _FOLDER_NAME)


def this_job(program: str) -> JobProcess:
    """Return the process id and start time of this process, the launcher of ``program``."""
    return job_of(os.getpid(), program)


def job_of(pid: int, program: str) -> JobProcess:
    """Return the process id and start time of the process ``pid``, which launches ``program``."""
    stat = read_stat(pid)
    return JobProcess(pid=pid, process_start=stat.start_ticks if stat else 0, program=program)


class OvertakenError(Exception):
    """Another job just leased some of the CPUs that this job chose, so this job chooses again."""


# A job's place in the queue for CPUs, kept until ``close`` is called or the process ends.
QueuePlace: TypeAlias = HeldFile[QueueRecord]


class Lease:
    """CPUs that this process holds until ``close`` is called or the process ends.

    If leases are turned off or unusable on this machine, the lease has no file and no CPUs.
    """

    def __init__(self, file: HeldFile[LeaseRecord] | None = None) -> None:
        self._file = file

    @property
    def cpus(self) -> tuple[int, ...]:
        """The leased CPUs; empty if leases are turned off or unusable on this machine."""
        return () if self._file is None else self._file.record.cpus

    @property
    def is_shared(self) -> bool:
        """Whether other jobs already held some of the CPUs when this lease was taken."""
        return self._file is not None and self._file.record.is_shared

    def name_run(self, run_id: str) -> None:
        """Add the name of the job's run to the lease file, so that other jobs can show it."""
        if self._file is None:
            return
        record = self._file.record
        # If the run name cannot be written, the lease stays valid without a run name.
        with (
            contextlib.suppress(OSError),
            contextlib.closing(LeaseFolder(self._file.path.parent)) as folder,
            folder.mutex(),
        ):
            self._file.write(record._replace(job=record.job._replace(run_id=run_id)))

    def close(self) -> None:
        """Give the leased CPUs back. A second call of ``close`` does nothing."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LeaseTable:
    """All leases of this machine's CPUs and all waiting jobs, read from the folder of leases.

    If an instance of an outer job launches this job, this job may use the outer job's CPUs.
    The lease of the outer job is in ``outer_leases`` and not in ``leases``.
    """

    def __init__(self, folder: LeaseFolder) -> None:
        self._folder = folder
        records = folder.live_records()
        leases = [each for each in records if isinstance(each, LeaseRecord)]
        leases.sort(key=lambda each: (each.since, each.name))
        above = _ancestors() if leases else frozenset()
        outer = [each for each in leases if (each.job.pid, each.job.process_start) in above]
        self.outer_leases = tuple(outer)
        self.leases = tuple(_without_suspended(each) for each in leases if each not in outer)
        self._outer = outer[-1].name if outer else ""
        queue = (each for each in records if isinstance(each, QueueRecord))
        self.queue = tuple(sorted(queue, key=lambda each: each.sort_key))

    @property
    def held_cpus(self) -> frozenset[int]:
        """The CPUs that other jobs hold."""
        return cpus_of(self.leases)

    def ahead_of(self, place: QueuePlace | None) -> tuple[QueueRecord, ...]:
        """Return the jobs in front of ``place`` in the queue; all jobs if ``place`` is None.

        Jobs that run inside the same outer job wait only for one another, because no other job may
        use the outer job's CPUs. A job that is stopped (``Ctrl-Z``) is left out, so that it does
        not block the queue.
        """
        queue = (each for each in self.queue if each.outer == self._outer)
        if place is not None:
            queue = (each for each in queue if each.sort_key < place.record.sort_key)
        return tuple(each for each in queue if not _is_stopped(each.job))

    def take(
        self,
        job: JobProcess,
        cpus: Sequence[int],
        numa_nodes: Sequence[int],
        *,
        is_shared: bool = False,
        is_shareable: bool = False,
    ) -> Lease:
        """Lease CPUs for this process; the caller must have checked that the CPUs are free.

        ``LeaseRecord`` describes ``is_shared`` and ``is_shareable``.

        Raises:
            OvertakenError: Another job leased some of the CPUs after the table of leases was read.
            OSError: The lease file cannot be written.
        """
        record = LeaseRecord(
            name=_file_name(LEASE_PREFIX, job),
            user="",
            job=job,
            cpus=tuple(sorted(cpus)),
            numa_nodes=tuple(sorted(numa_nodes)),
            since=time.time(),
            is_shared=is_shared,
            is_shareable=is_shareable,
        )
        file = self._folder.create(record)
        try:
            # Each job creates its lease file before it looks for the lease files of other jobs. If
            # two jobs lease CPUs at the same time without the mutex, at least one job therefore
            # finds the lease file of the other job.
            if not is_shared and self._is_overtaken(record):
                raise OvertakenError
        except (OSError, OvertakenError):
            file.close()
            raise
        return Lease(file)

    def _is_overtaken(self, record: LeaseRecord) -> bool:
        """Return whether another job leased CPUs of ``record`` after the leases were read."""
        known = {each.name for each in (*self.outer_leases, *self.leases, record)}
        return any(
            isinstance(each, LeaseRecord) and not set(each.cpus).isdisjoint(record.cpus)
            for each in self._folder.live_records(known)
        )

    def join_queue(self, job: JobProcess) -> QueuePlace:
        """Put this process at the end of the queue for CPUs.

        Raises:
            OSError: The file with the job's place in the queue cannot be written.
        """
        # If several jobs have the highest possible queue number, the time of arrival decides their
        # order.
        number = max((each.number for each in self.queue), default=0) + 1
        record = QueueRecord(
            name=_file_name(QUEUE_PREFIX, job),
            user="",
            job=job,
            number=min(number, MAX_NUMBER),
            since=time.time(),
            outer=self._outer,
        )
        return self._folder.create(record)


def _file_name(prefix: str, job: JobProcess) -> str:
    return f"{prefix}{job.pid}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def open_table(folder: LeaseFolder) -> Iterator[LeaseTable]:
    """Lock the folder of leases like ``LeaseFolder.mutex``, and yield the table of leases.

    Raises:
        OSError: The folder of leases cannot be locked or read.
    """
    with folder.mutex():
        yield LeaseTable(folder)


def decide_on_table(folder: LeaseFolder, decide: Callable[[LeaseTable], Decision]) -> Decision:
    """Return the result of ``decide``, which is called again if it raises OvertakenError.

    Raises:
        OSError: The leases cannot be read, or other jobs took the CPUs first in every attempt.
    """
    for _ in range(_MAX_DECISIONS):
        with contextlib.suppress(OvertakenError), open_table(folder) as table:
            return decide(table)
        # The pause is random, so that two jobs in conflict do not retry at the same moment.
        time.sleep(_PAUSE_SECONDS * os.urandom(1)[0] / 255)
    raise OSError(
        errno.EBUSY, "other jobs took the CPUs first in every attempt; try again", str(folder.path)
    )


def all_records(
    place: Path | None,
) -> tuple[tuple[LeaseRecord, ...], tuple[QueueRecord, ...]]:
    """Return all leases of this machine's CPUs and the queue of jobs that wait for CPUs.

    Args:
        place: The folder of leases; None if leases are turned off.

    Raises:
        OSError: The folder of leases cannot be locked or read.
    """
    if place is None or not place.exists():
        return (), ()
    folder = LeaseFolder(place)
    with contextlib.closing(folder), open_table(folder) as table:
        return (*table.outer_leases, *table.leases), table.queue


@functools.cache
def user_name(user: str) -> str:
    """Return the name of a user id. Looking up a name may take seconds: do not hold the mutex."""
    import pwd

    try:
        return pwd.getpwuid(int(user)).pw_name
    except (KeyError, ValueError, OverflowError):
        return user


def _ancestors() -> frozenset[tuple[int, int]]:
    """Return the process id and the start time of each ancestor of this process."""
    found: set[tuple[int, int]] = set()
    stat = read_stat(os.getpid())
    while stat is not None and stat.parent > 0:
        parent = stat.parent
        stat = read_stat(parent)
        if stat is not None:
            found.add((parent, stat.start_ticks))
    return frozenset(found)


def _without_suspended(lease: LeaseRecord) -> LeaseRecord:
    """Return a lease, marked as shareable if its job is suspended and so does not compute."""
    return lease._replace(is_shareable=True) if _is_stopped(lease.job) else lease


def _is_stopped(job: JobProcess) -> bool:
    stat = read_stat(job.pid)
    return stat is not None and stat.state in "Tt" and stat.start_ticks == job.process_start
