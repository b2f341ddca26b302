"""Files that are there while their maker lives: each has a lock of the kernel, gone with it.

The folder may be everybody's: nothing in it is trusted, links and pipes are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

_MUTEX = "mutex"
_UNFINISHED = ".new-"
# No file of ours is longer: 4096 single CPUs take 20 kB.
_MAX_BYTES = 1 << 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A file that cannot be opened for these reasons may well be a living one's.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# It is held for a millisecond: after so long its holder was stopped, or wants to be in the way.
_MUTEX_SECONDS, _MUTEX_PAUSE_SECONDS = 5.0, 0.001
# Every user can lock the mutex. If other users hold it for longer than this, go on without it.
_STRANGER_SECONDS, _STRANGER_PAUSE_SECONDS = 0.25, 0.02
# How often to make a file again if another process removed it as a leftover.
_MOST_TRIES = 5


class LockedFolder:
    """A folder of locked files, with a mutex for those who make or read them.

    Args:
        path: the folder; it is made, for everybody, if it is not there.

    Raises:
        OSError: it cannot be used, or others could replace our files in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stranger_seconds = _STRANGER_SECONDS
        _make_for_everybody(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        mode = os.fstat(self._descriptor).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            self.close()
            raise PermissionError(
                errno.EPERM, f"others may replace files in it (chmod 1777 {path})", str(path)
            )

    def close(self) -> None:
        """Close the folder; files that were made stay."""
        os.close(self._descriptor)

    # --- the mutex --------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the mutex within the block; yield False if another user prevents that.

        Without the mutex, other processes may make files at the same time. A process that makes a
        file then has to check the files of the others again afterwards.

        Raises:
            OSError: the mutex cannot be had.
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
                # Its owner may have removed it meanwhile: then others lock another file.
                if self._is_mutex(descriptor):
                    yield True
                    return
            finally:
                os.close(descriptor)

    def _open_mutex(self) -> int:
        """Open the mutex to read it: a lock needs no more, whoever made the file."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(_MUTEX, _READ, dir_fd=self._descriptor)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return descriptor
                os.close(descriptor)
                raise OSError(errno.EINVAL, "no regular file", str(self.path / _MUTEX))
            with contextlib.suppress(FileExistsError):
                # Not with the opening above: the kernel may refuse to open a stranger's file so.
                flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(_MUTEX, flags, 0o600, dir_fd=self._descriptor)
                os.fchmod(descriptor, 0o644)
                return descriptor

    def _lock_before(self, descriptor: int, deadline: float) -> bool:
        """Lock the mutex for this process alone; return False if other users keep it locked.

        Raises:
            TimeoutError: a process of this user, or of an unknown user, keeps it locked.
        """
        since, look_at = math.inf, 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._stranger_seconds = _STRANGER_SECONDS
                return True
            except BlockingIOError:
                now = time.monotonic()
                # A blocking flock has no time-out, so the lock is polled.
                if now > deadline:
                    path = str(self.path / _MUTEX)
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another process keeps it locked", path
                    ) from None
            if now >= look_at:
                look_at = now + _STRANGER_PAUSE_SECONDS
                users = _users_that_lock(os.fstat(descriptor), _locks())
                since = min(since, now) if users and os.geteuid() not in users else math.inf
            if now - since >= self._stranger_seconds:
                self._stranger_seconds = 0.0  # do not wait for them again
                return False
            time.sleep(_MUTEX_PAUSE_SECONDS)

    def _is_mutex(self, descriptor: int) -> bool:
        try:
            there = os.stat(_MUTEX, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(descriptor), there)

    # --- the files --------------------------------------------------------------------------

    def make(self, name: str, text: str) -> int:
        """Make a file that all may read, locked by the descriptor that is returned; when alone.

        It is seen whole and locked, or not at all.

        Raises:
            OSError: it cannot be made; nothing is left of it.
        """
        for _ in range(_MOST_TRIES):
            # Without the mutex, another process may remove the file before it is locked, or lock it
            # for a moment to test it.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return self._make(name, text)
        raise FileNotFoundError(errno.ENOENT, "others remove what is made", str(self.path))

    def _make(self, name: str, text: str) -> int:
        unfinished = f"{_UNFINISHED}{os.getpid()}-{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600, dir_fd=self._descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rewrite(descriptor, text)
            os.fchmod(descriptor, 0o644)
            folder = self._descriptor
            os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            self.remove(unfinished, descriptor)
            raise
        return descriptor

    def rewrite(self, descriptor: int, text: str) -> None:
        """Put other text into a file that was made; when alone.

        Raises:
            OSError: it cannot be written.
        """
        data = text.encode()
        if os.pwrite(descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.ftruncate(descriptor, len(data))

    def remove(self, name: str, descriptor: int) -> None:
        """Remove a file that was made, and give its lock back."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)
        os.close(descriptor)

    def living(
        self, *, sweeps: bool = True, except_for: Collection[str] = ()
    ) -> list[tuple[str, int, bytes]]:
        """Return name, owner and text of every file whose maker is alive.

        Files of other users cannot be removed; they are only left out.

        Args:
            sweeps: whether to remove the files of dead makers. This requires the mutex: without
                it, an unfinished file may belong to a process that is still making it.
            except_for: names of files to leave out.

        Raises:
            OSError: the folder cannot be read.
        """
        found = []
        locks = functools.cache(_locks)
        for name in sorted(os.listdir(self._descriptor)):  # noqa: PTH208 (no path)
            is_unfinished = name.startswith(_UNFINISHED)
            if name == _MUTEX or name in except_for or (is_unfinished and not sweeps):
                continue
            try:
                descriptor = os.open(name, _READ, dir_fd=self._descriptor)
            except OSError as error:
                if error.errno in _OURS:
                    raise
                continue
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if not _is_locked(descriptor) or _is_strangers_lock(status, locks()):
                    if sweeps:
                        self._sweep(name)
                elif status.st_size <= _MAX_BYTES and not name.startswith("."):
                    found.append((name, status.st_uid, os.pread(descriptor, _MAX_BYTES, 0)))
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return found

    def _sweep(self, name: str) -> None:
        # Only what a process of ours may have left: the folder may be a user's own.
        if name.startswith((_UNFINISHED, "lease-", "ticket-")):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)


def problem_text(error: OSError, folder: Path) -> str:
    """Return what is wrong with a folder of locked files, with the path that it is about."""
    named = error.filename if isinstance(error.filename, str) else ""
    # What is opened within the folder has a name only.
    return f"{named if named.startswith('/') else folder}: {error.strerror}"


def _make_for_everybody(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: another user may come between a folder and its mode.
    before = os.umask(0)
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o1777)
    finally:
        os.umask(before)


def _is_locked(descriptor: int) -> bool:
    # Shared: others who look at the same moment do not take one another for the maker.
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
        try:
            users.add(Path(f"/proc/{pid}").stat().st_uid)
        except OSError:
            return frozenset()
    return frozenset(users)


def _is_strangers_lock(status: os.stat_result, locks: Mapping[str, Sequence[int]]) -> bool:
    """Return whether users other than its owner and root lock a file: its maker is dead then."""
    users = _users_that_lock(status, locks)
    return bool(users) and users.isdisjoint({status.st_uid, 0})
