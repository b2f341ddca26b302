"""The files of leases and queued jobs, with the locks that show whether a job is alive.

Each lease file is locked by the process that created the file. The kernel releases the lock when
the process ends, so the file of a dead process is recognised at once. All users share the folder of
lease files, so the files are not trusted: symbolic links and named pipes are not read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from poprun_py.display.formatting import printable
from poprun_py.process_info import owner

LEASE_PREFIX, QUEUE_PREFIX = "lease-", "ticket-"
MAX_NUMBER = (1 << 53) - 1
_VERSION = 1
# Names of users and programs are cut to _MAX_NAME characters. Valid run names have at most
# _MAX_RUN_NAME characters and are therefore not cut: runs are compared by name.
_MAX_NAME, _MAX_RUN_NAME = 80, 128
# An upper bound for CPU numbers: Linux supports fewer than 65,536 CPUs.
_MAX_CPU = 1 << 16

_UNFINISHED = ".new-"
# The maximum size of a valid lease file, in bytes. A lease of 4096 CPUs has a file of 20 kB.
_MAX_BYTES = 1 << 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# These error numbers mean that the system has run out of resources. The lease file may be valid.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# A process usually locks the folder of leases for about a millisecond. A process that locks the
# folder for 5 s has been stopped (Ctrl-Z), or blocks other processes on purpose.
_MUTEX_SECONDS, _MUTEX_PAUSE_SECONDS = 5.0, 0.001
# Every user can lock the folder of leases. If another user still locks the folder after 0.25 s,
# this process continues without the lock.
_OTHER_USER_SECONDS, _OTHER_USER_PAUSE_SECONDS = 0.25, 0.02
# The number of attempts to create a lease file. An attempt fails if another process mistakes the
# new file for the file of a dead process and removes the new file.
_MAX_TRIES = 5


# --- records of leases and queued jobs ----------------------------------------------------------
# The records of leases are named tuples: every launch imports this module, and the definition of a
# data class takes eight times as long.


class JobProcess(NamedTuple):
    """The launcher process of a job, with the names of the job's program and of the job's run.

    ``process_start`` is the start time of the process in clock ticks since boot. The start time
    distinguishes the process from a later process with the same id. ``run_id`` is empty until the
    run has a name.
    """

    pid: int
    process_start: int
    program: str
    run_id: str = ""


class LeaseRecord(NamedTuple):
    """A job's lease of CPUs.

    ``user`` is the owner of the lease file: a user id, or a user name if the record comes from
    another host. ``since`` is the time at which the lease was taken, in seconds since the epoch.
    ``is_shared`` is True if other jobs already held or awaited some of the CPUs when the lease was
    taken. ``is_shareable`` is True if the job leaves its CPUs to other jobs: the job has more
    instances than CPUs, does not bind its instances to CPUs, or is suspended (``Ctrl-Z``).
    """

    name: str
    user: str
    job: JobProcess
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    since: float
    is_shared: bool = False
    is_shareable: bool = False


class QueueRecord(NamedTuple):
    """A job that waits for CPUs.

    The queue is sorted by ``number``, and jobs with equal numbers by the time of their arrival. If
    the job runs inside an instance of an outer job, ``outer`` is the name of the outer job's lease
    file; otherwise, ``outer`` is empty.
    """

    name: str
    user: str
    job: JobProcess
    number: int
    since: float
    outer: str = ""

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """The sort key of this job in the queue."""
        return self.number, self.since, self.name


Record = LeaseRecord | QueueRecord
RecordT = TypeVar("RecordT", bound=Record)


def record_text(record: Record) -> str:
    """Return the content of a record's file, without the user, who is the owner of the file."""
    data: dict[str, Any] = {"version": _VERSION, **record.job._asdict(), "since": record.since}
    if isinstance(record, QueueRecord):
        data |= {"number": record.number, "outer": record.outer}
    else:
        data |= {
            "cpus": record.cpus,
            "numa_nodes": record.numa_nodes,
            "shared": record.is_shared,
            "shareable": record.is_shareable,
        }
    return json.dumps(data) + "\n"


def parse_record(name: str, user: str, text: bytes) -> Record | None:
    """Return the record that a file contains; None if the file's name or content is not valid."""
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            return None
        job = JobProcess(
            pid=_whole(data["pid"]),
            process_start=_whole(data["process_start"]),
            program=printable_name(data["program"]),
            run_id=printable_name(data["run_id"], _MAX_RUN_NAME),
        )
        since = _seconds(data["since"])
        if name.startswith(LEASE_PREFIX):
            cpus, nodes = _indices(data["cpus"]), _indices(data["numa_nodes"])
            # Older versions of poprun-py do not write "shareable".
            flags = (data["shared"] is True, data.get("shareable") is True)
            return LeaseRecord(name, user, job, cpus, nodes, since, *flags) if cpus else None
        if name.startswith(QUEUE_PREFIX):
            outer = printable_name(data["outer"])
            return QueueRecord(name, user, job, _whole(data["number"]), since, outer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return float(value)


def _indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < _MAX_CPU for n in value):
        raise ValueError(value)
    return tuple(sorted(set(value)))


def printable_name(value: Any, max_length: int = _MAX_NAME) -> str:
    """Shorten a name that another user wrote, and replace the control characters in the name.

    Raises:
        TypeError: The value is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(value)
    return printable(value[:max_length])


# --- the folder of lease files ------------------------------------------------------------------


class HeldFile(Generic[RecordT]):
    """The file of a lease or queued job, locked until ``close`` is called or this process ends."""

    def __init__(self, path: Path, record: RecordT, descriptor: int) -> None:
        self.path, self.record, self.descriptor = path, record, descriptor

    def write(self, record: RecordT) -> None:
        """Replace the record in the file. The caller must hold the mutex of the folder of leases.

        Raises:
            OSError: The record cannot be written.
        """
        data = record_text(record).encode()
        if os.pwrite(self.descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path.parent))
        os.ftruncate(self.descriptor, len(data))
        self.record = record

    def close(self) -> None:
        """Remove the lease file, and release its lock. A second call of ``close`` does nothing."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self.descriptor)
        self.descriptor = -1


class LeaseFolder:
    """The folder of lease files; a lock on the folder itself is the mutex of all launchers.

    Args:
        path: The path of the folder; a missing folder is created, with write access for all users.

    Raises:
        OSError: The folder cannot be used, or other users could replace this user's lease files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._other_user_seconds, self._has_mutex = _OTHER_USER_SECONDS, False
        _make_shared_folder(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        mode = os.fstat(self._descriptor).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            self.close()
            raise PermissionError(
                errno.EPERM,
                f"other users can replace files in this folder; run chmod 1777 {path}",
                str(path),
            )

    def close(self) -> None:
        """Close the folder of leases, but keep the lease files that this process created there."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        """Lock the folder of leases within the block, unless another user keeps the folder locked.

        Without the lock, several processes may create lease files at the same time. After creating
        a file, a process must therefore read the files of other processes again.

        Raises:
            OSError: The folder of leases cannot be locked.
        """
        self._has_mutex = self._lock()
        try:
            yield
        finally:
            if self._has_mutex:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._has_mutex = False

    def _lock(self) -> bool:
        """Lock the folder of leases; return False if other users keep the folder locked.

        Raises:
            TimeoutError: A process of this user, or of an unknown user, keeps the folder locked.
        """
        now = time.monotonic()
        deadline, next_check = now + _MUTEX_SECONDS, now + self._other_user_seconds
        # The lock is polled, because a blocking flock call cannot time out.
        while not _try_lock(self._descriptor, fcntl.LOCK_EX):
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _OTHER_USER_PAUSE_SECONDS
                users = _users_that_lock(os.fstat(self._descriptor), _locks())
                if users and os.geteuid() not in users:
                    self._other_user_seconds = 0.0  # the next call does not wait for other users
                    return False
            if now > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    "another process keeps this folder of leases locked",
                    str(self.path),
                )
            time.sleep(_MUTEX_PAUSE_SECONDS)
        self._other_user_seconds = _OTHER_USER_SECONDS
        return True

    def create(self, record: RecordT) -> HeldFile[RecordT]:
        """Create and lock the file of a record, with read access for all users.

        The file gets the name of the record only after the file is complete and locked. The caller
        must hold the mutex of the folder, unless another user keeps the folder locked.

        Raises:
            OSError: The record's file cannot be created. No unfinished file is left.
        """
        for _ in range(_MAX_TRIES):
            # Without the mutex, another process may remove the new file before this process locks
            # the file, or may lock the new file to test whether the creator of the file is alive.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return self._create(record)
        raise FileNotFoundError(
            errno.ENOENT,
            "the folder was removed, or other processes remove new files from it",
            str(self.path),
        )

    def _create(self, record: RecordT) -> HeldFile[RecordT]:
        unfinished = f"{_UNFINISHED}{os.getpid()}-{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600, dir_fd=self._descriptor)
        file = HeldFile(self.path / unfinished, record, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(record)
            os.fchmod(descriptor, 0o644)
            folder = self._descriptor
            os.rename(unfinished, record.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            file.close()
            raise
        file.path = self.path / record.name
        return file

    def live_records(self, known: Collection[str] = ()) -> list[Record]:
        """Return the valid records of leases and queued jobs whose processes are alive.

        Files whose names are in ``known`` are skipped.

        Under the mutex, the files of this user's dead processes are removed. Without the mutex,
        unfinished files are skipped, because their processes may still write them.

        Raises:
            OSError: The folder of leases cannot be read.
        """
        found = []
        locks = functools.cache(_locks)
        # Files with other names are ignored: the user may keep other files in the folder of leases.
        names = (LEASE_PREFIX, QUEUE_PREFIX, *((_UNFINISHED,) if self._has_mutex else ()))
        for name in sorted(os.listdir(self._descriptor)):  # noqa: PTH208 (no path)
            if name in known or not name.startswith(names):
                continue
            try:
                descriptor = os.open(name, _READ, dir_fd=self._descriptor)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    raise
                continue
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    continue
                # If a shared lock succeeds, the creator of the file is dead. With exclusive locks,
                # two processes that test the file would mistake each other for the creator.
                is_dead = _try_lock(descriptor, fcntl.LOCK_SH)
                if is_dead or _is_locked_by_other_user(status, locks()):
                    if self._has_mutex:
                        os.unlink(name, dir_fd=self._descriptor)
                elif status.st_size <= _MAX_BYTES:
                    text = os.pread(descriptor, _MAX_BYTES, 0)
                    # The record has a user id instead of a user name: other processes wait for the
                    # mutex, and looking up a user name may take seconds.
                    found.append(parse_record(name, str(status.st_uid), text))
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return [record for record in found if record is not None]


def problem_text(error: OSError, folder: Path) -> str:
    """Return a description of an error in a lease folder, with the path of the file or folder."""
    path = error.filename if isinstance(error.filename, str) else ""
    # Errors about files that were opened relative to the folder contain only the file name.
    return f"{path if path.startswith('/') else folder}: {error.strerror}"


def _make_shared_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkdir itself sets the access mode of the folder, because another user could use the folder
    # before a separate chmod.
    before = os.umask(0)
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o1777)
    finally:
        os.umask(before)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file (LOCK_EX or LOCK_SH); return False if another process keeps the file locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks() -> dict[str, list[int]]:
    """Return the ids of the processes that lock each file; the keys are ``device:inode`` (proc(5)).

    Reading the kernel's list of locks takes some 10 ms, in which no process can lock a file.
    Callers therefore read the list of locks only when needed.
    """
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # The second field of a line in /proc/locks is the kind of lock, or an arrow for a
            # process that waits for a lock.
            _, kind, _, _, pid, file, *_ = line.split()
            if kind == "FLOCK":
                found.setdefault(file, []).append(int(pid))
    return found


def _users_that_lock(status: os.stat_result, locks: Mapping[str, Sequence[int]]) -> frozenset[int]:
    """Return the ids of the users that lock a file; empty if the user of a lock is unknown."""
    device = status.st_dev
    users = set()
    for pid in locks.get(f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}", ()):
        user = owner(pid)
        if user is None:
            return frozenset()
        users.add(user)
    return frozenset(users)


def _is_locked_by_other_user(status: os.stat_result, locks: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a file is locked, but not by its owner or root.

    A file that only other users lock belongs to a dead job, because the job's own lock is gone.
    """
    users = _users_that_lock(status, locks)
    return bool(users) and users.isdisjoint({status.st_uid, 0})
