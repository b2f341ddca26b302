"""The files of leases and queued jobs, with the locks that show whether a job is alive.

Each file is locked by the process that created it. The kernel releases the lock when the process
ends, so the file of a dead process is recognised at once. All users share the folder. Its files
are therefore not trusted, and links and pipes in it are not followed.
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
from typing import Any, NamedTuple

from poprun_py.display.formatting import printable
from poprun_py.process_info import owner

LEASE_PREFIX, QUEUE_PREFIX = "lease-", "ticket-"
MAX_NUMBER = (1 << 53) - 1
_VERSION = 1
# Runs are compared by name, so their names must not be cut. No run name is longer than this.
_MAX_NAME, _MAX_RUN_NAME = 80, 128
# Linux supports fewer CPUs than this.
_MAX_CPU = 1 << 16

_MUTEX = "mutex"
_UNFINISHED = ".new-"
# All valid files are shorter. A lease of 4096 CPUs takes 20 kB.
_MAX_BYTES = 1 << 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Errors of the whole system. They do not mean that a file is invalid or its process dead.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# A process holds the mutex for about a millisecond. After this time its holder has been stopped, or
# holds it on purpose.
_MUTEX_SECONDS, _MUTEX_PAUSE_SECONDS = 5.0, 0.001
# Every user can lock the mutex. If other users hold it for longer than this, go on without it.
_OTHER_USER_SECONDS, _OTHER_USER_PAUSE_SECONDS = 0.25, 0.02
# The number of attempts to create a file that another process removes as a leftover.
_MAX_TRIES = 5


# --- records ------------------------------------------------------------------------------------
# The records are named tuples because every launch imports this module: a data class takes eight
# times as long to create.


class JobProcess(NamedTuple):
    """A job's launcher process, with the names of its program and of its run.

    ``process_start`` is the start time of the process in clock ticks since boot. It distinguishes
    the process from a later one with the same id. ``run_id`` is empty until the run has a name.
    """

    pid: int
    process_start: int
    program: str
    run_id: str = ""


class LeaseRecord(NamedTuple):
    """A job's lease of CPUs.

    ``user`` is the owner of the file: a user id, or a user name if the record comes from another
    host. ``since`` is in seconds since the epoch. ``is_shared`` tells that other jobs already held
    some of the CPUs when the lease was taken.
    """

    name: str
    user: str
    job: JobProcess
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    since: float
    is_shared: bool = False


class QueueRecord(NamedTuple):
    """A job that waits for CPUs.

    The queue is sorted by ``number``, and jobs with equal numbers by the time of their arrival. If
    the job runs inside an instance of another job, ``outer`` is the file name of that job's lease.
    Otherwise it is empty.
    """

    name: str
    user: str
    job: JobProcess
    number: int
    since: float
    outer: str = ""

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """The key that sorts the queue."""
        return self.number, self.since, self.name


Record = LeaseRecord | QueueRecord


def record_text(record: Record) -> str:
    """Return the content of a record's file, which leaves out the user, the file's owner."""
    job = record.job
    data: dict[str, Any] = {
        "version": _VERSION,
        "pid": job.pid,
        "process_start": job.process_start,
        "program": job.program,
        "run_id": job.run_id,
        "since": record.since,
    }
    if isinstance(record, QueueRecord):
        data |= {"number": record.number, "outer": record.outer}
    else:
        data |= {
            "cpus": record.cpus,
            "numa_nodes": record.numa_nodes,
            "shared": record.is_shared,
        }
    return json.dumps(data) + "\n"


def parse_record(name: str, user: str, text: bytes) -> Record | None:
    """Return the record in the file ``name``; None if its name or content is not valid."""
    try:
        data = _load(text)
        job, since = _job(data), _seconds(data["since"])
        if name.startswith(LEASE_PREFIX):
            cpus, numa_nodes = _indices(data["cpus"]), _indices(data["numa_nodes"])
            is_shared = data["shared"] is True
            return (
                LeaseRecord(name, user, job, cpus, numa_nodes, since, is_shared) if cpus else None
            )
        if name.startswith(QUEUE_PREFIX):
            outer = printable_name(data["outer"])
            return QueueRecord(name, user, job, _whole(data["number"]), since, outer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _load(text: bytes) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict) or data["version"] != _VERSION:
        raise ValueError(text)
    return data


def _job(data: dict[str, Any]) -> JobProcess:
    return JobProcess(
        pid=_whole(data["pid"]),
        process_start=_whole(data["process_start"]),
        program=printable_name(data["program"]),
        run_id=printable_name(data["run_id"], _MAX_RUN_NAME),
    )


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
    """Return the start of a name, without control codes that another user may have put into it.

    Raises:
        TypeError: The value is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(value)
    return printable(value[:max_length])


# --- the folder ---------------------------------------------------------------------------------


class LeaseFolder:
    """A folder of locked files, with a mutex for the processes that create or read them.

    Args:
        path: The folder. If it is missing, it is created so that all users can write to it.

    Raises:
        OSError: The folder cannot be used, or other users could replace this user's files in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._other_user_seconds = _OTHER_USER_SECONDS
        _make_shared_folder(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        mode = os.fstat(self._descriptor).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            self.close()
            raise PermissionError(
                errno.EPERM, f"others may replace files in it (chmod 1777 {path})", str(path)
            )

    def close(self) -> None:
        """Close the folder. The files that this process created stay."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def mutex(self) -> Iterator[bool]:
        """Hold the mutex within the block; yield False if another user prevents that.

        Without the mutex, other processes may create files at the same time. A process that creates
        a file then has to read the files of the others again afterwards.

        Raises:
            OSError: The mutex cannot be opened or locked.
        """
        deadline = time.monotonic() + _MUTEX_SECONDS
        while True:
            try:
                descriptor = self._open_mutex()
            except PermissionError:  # another user made it unreadable for all others
                yield False
                return
            try:
                if not self._lock_before(descriptor, deadline):
                    yield False
                    return
                # If the owner removed the file meanwhile, other processes lock a new one.
                if self._is_mutex(descriptor):
                    yield True
                    return
            finally:
                os.close(descriptor)

    def _open_mutex(self) -> int:
        """Open the mutex for reading, which is enough to lock it, whoever owns the file."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(_MUTEX, _READ, dir_fd=self._descriptor)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return descriptor
                os.close(descriptor)
                raise OSError(errno.EINVAL, "not a regular file", str(self.path / _MUTEX))
            with contextlib.suppress(FileExistsError):
                # The call above must not have O_CREAT, because the kernel may then refuse to open
                # another user's file in a sticky folder.
                flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(_MUTEX, flags, 0o600, dir_fd=self._descriptor)
                os.fchmod(descriptor, 0o644)
                return descriptor

    def _lock_before(self, descriptor: int, deadline: float) -> bool:
        """Lock the mutex exclusively; return False if other users keep it locked.

        Raises:
            TimeoutError: A process of this user, or of an unknown user, keeps it locked.
        """
        since, next_check = math.inf, 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._other_user_seconds = _OTHER_USER_SECONDS
                return True
            except BlockingIOError:
                now = time.monotonic()
                # The lock is polled, because a blocking flock call cannot time out.
                if now > deadline:
                    path = str(self.path / _MUTEX)
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another process keeps it locked", path
                    ) from None
            if now >= next_check:
                next_check = now + _OTHER_USER_PAUSE_SECONDS
                users = _users_that_lock(os.fstat(descriptor), _locks())
                since = min(since, now) if users and os.geteuid() not in users else math.inf
            if now - since >= self._other_user_seconds:
                self._other_user_seconds = 0.0  # do not wait for them again
                return False
            time.sleep(_MUTEX_PAUSE_SECONDS)

    def _is_mutex(self, descriptor: int) -> bool:
        try:
            found = os.stat(_MUTEX, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(descriptor), found)

    def create(self, record: Record) -> int:
        """Create a record's file, which all users can read; return the descriptor that locks it.

        Other processes see the file complete and locked, or not at all. The caller holds the mutex.

        Raises:
            OSError: The file cannot be created; no part of it is left.
        """
        for _ in range(_MAX_TRIES):
            # Without the mutex, another process may remove the file before it is locked, or lock it
            # for a moment to test it.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return self._create(record)
        raise FileNotFoundError(
            errno.ENOENT, "other processes remove files that are created in it", str(self.path)
        )

    def _create(self, record: Record) -> int:
        unfinished = f"{_UNFINISHED}{os.getpid()}-{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600, dir_fd=self._descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rewrite(descriptor, record)
            os.fchmod(descriptor, 0o644)
            folder = self._descriptor
            os.rename(unfinished, record.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            self.remove(unfinished, descriptor)
            raise
        return descriptor

    def rewrite(self, descriptor: int, record: Record) -> None:
        """Replace the record in a file that this process created. The caller holds the mutex.

        Raises:
            OSError: The record cannot be written.
        """
        data = record_text(record).encode()
        if os.pwrite(descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.ftruncate(descriptor, len(data))

    def remove(self, name: str, descriptor: int) -> None:
        """Remove a file that this process created, and release its lock."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)
        os.close(descriptor)

    def live_records(
        self, *, cleans_up: bool = True, except_for: Collection[str] = ()
    ) -> list[Record]:
        """Return the valid records whose processes are alive.

        Args:
            cleans_up: Whether to remove the files of dead processes, except those of other users.
                This requires the mutex, because without it an unfinished file may belong to a
                process that is still writing it.
            except_for: Names of files to leave out.

        Raises:
            OSError: The folder cannot be read.
        """
        found = []
        locks = functools.cache(_locks)
        # Files with other names are kept, because the folder may hold the user's own files.
        names = (LEASE_PREFIX, QUEUE_PREFIX, *((_UNFINISHED,) if cleans_up else ()))
        for name in sorted(os.listdir(self._descriptor)):  # noqa: PTH208 (no path)
            if name in except_for or not name.startswith(names):
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
                if not _is_locked(descriptor) or _is_locked_by_other_user(status, locks()):
                    if cleans_up:
                        os.unlink(name, dir_fd=self._descriptor)
                elif status.st_size <= _MAX_BYTES:
                    text = os.pread(descriptor, _MAX_BYTES, 0)
                    # The user stays a number here, because looking up its name may take seconds
                    # while other processes wait for the mutex.
                    found.append(parse_record(name, str(status.st_uid), text))
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return [record for record in found if record is not None]


def problem_text(error: OSError, folder: Path) -> str:
    """Return a description of an error of a lease folder, with the path that it concerns."""
    path = error.filename if isinstance(error.filename, str) else ""
    # Files that were opened within the folder are named without their folder.
    return f"{path if path.startswith('/') else folder}: {error.strerror}"


def _make_shared_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkdir itself sets the mode, because another user could interfere before a later chmod.
    before = os.umask(0)
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o1777)
    finally:
        os.umask(before)


def _is_locked(descriptor: int) -> bool:
    # The test lock is shared, so that two processes that test a file at the same time do not
    # mistake each other for its creator.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _locks() -> dict[str, list[int]]:
    """Return the ids of the processes that lock files, by the file's device and inode (proc(5)).

    Reading the kernel's list keeps all processes from locking files for some 10 ms. It is therefore
    read only when it is needed.
    """
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # A process that only waits for a lock has an arrow in the second field instead.
            _, kind, _, _, pid, file, *_ = line.split()
            if kind == "FLOCK":
                found.setdefault(file, []).append(int(pid))
    return found


def _users_that_lock(status: os.stat_result, locks: Mapping[str, Sequence[int]]) -> frozenset[int]:
    """Return the users whose processes lock a file; empty if a process cannot be seen."""
    device = status.st_dev
    users = set()
    for pid in locks.get(f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}", ()):
        user = owner(pid)
        if user is None:
            return frozenset()
        users.add(user)
    return frozenset(users)


def _is_locked_by_other_user(status: os.stat_result, locks: Mapping[str, Sequence[int]]) -> bool:
    """Return whether only users other than root and the file's owner lock it: its job is dead."""
    users = _users_that_lock(status, locks)
    return bool(users) and users.isdisjoint({status.st_uid, 0})
