"""Lock files that show whether the processes that hold IPUs are still running.

When a process ends for any reason, the kernel releases its lock (``flock``). A program that the
locking process starts does not inherit the lock. A forked child closes its copy of the lock file's
descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from pathlib import Path

from popdist_py.pods.folder.file_names import HOLDERS
from popdist_py.pods.model.pod_errors import PodError

# The remedy if a file system does not support locks, for error messages.
_LOCAL_DISK = "set POPRUN_PODS to a folder on a local disk"


def own_locks() -> str:
    """Return a GLOB pattern that matches the names of this process's lock files."""
    return f"{os.getpid()}-*"


class HolderLock:
    """A file that a store locks at its first attachment and unlocks when the store is closed."""

    def __init__(self, folder: Path) -> None:
        """Prepare the lock for the pod in ``folder``, without making the lock file."""
        self._folder = folder / HOLDERS
        self._guard = threading.Lock()
        self._name: str | None = None
        self._descriptor = -1
        self._closed = False

    def take(self) -> str:
        """Make and lock the file if it is not locked yet; return its name.

        The caller must be inside a database transaction.

        Raises:
            PodError: The store is closed, or the file cannot be made or locked.
        """
        with self._guard:
            if self._closed:
                raise PodError(
                    f"this program has already closed the pod in {self._folder.parent}: open the "
                    "pod again"
                )
            if self._name is None:
                self._name, self._descriptor = self._locked_file()
                _locks.add(self)
            return self._name

    def _locked_file(self) -> tuple[str, int]:
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            descriptor = os.open(self._folder / name, flags, 0o600)
        except OSError as error:
            raise PodError(
                f"the folder {self._folder} cannot be written: {error.strerror}"
            ) from None
        try:
            if os.geteuid() == 0:
                # Root gives the lock file to the pod's owner, who must be able to check the lock.
                owner = self._folder.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
            raise PodError(
                f"a file in {self._folder} cannot be locked ({error.strerror}): {_LOCAL_DISK}"
            ) from None
        return name, descriptor

    def close(self) -> None:
        """Release the lock.

        The next call of any store of the pod then releases the IPUs that this store attached.
        """
        with self._guard:
            self._closed = True
            if self._name is not None:
                with contextlib.suppress(OSError):
                    (self._folder / self._name).unlink()
                os.close(self._descriptor)
                self._name = None
                _locks.discard(self)

    def forget_in_child(self) -> None:
        """Close the parent's lock file in a forked child, which has not attached IPUs itself."""
        self._guard = threading.Lock()
        if self._name is not None:
            os.close(self._descriptor)
            self._name = None


# The locks that this process holds, and that a forked child must forget. A store that is not closed
# holds its IPUs until the process ends.
_locks: set[HolderLock] = set()


def _forget_all() -> None:
    while _locks:
        _locks.pop().forget_in_child()


os.register_at_fork(after_in_child=_forget_all)


def is_alive(folder: Path, name: str) -> bool:
    """Return whether a store still holds the lock on the file ``name``.

    The caller must be inside a database transaction.

    Raises:
        PodError: The file cannot be read or checked.
    """
    try:
        descriptor = os.open(folder / HOLDERS / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except PermissionError:
        # The lock of another user's process cannot be checked, so its IPUs are not released.
        return True
    except OSError as error:
        raise PodError(
            f"the lock file {folder / HOLDERS / name} cannot be read: {error.strerror}"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise PodError(
            f"a file in {folder / HOLDERS} cannot be locked ({error.strerror}): {_LOCAL_DISK}"
        ) from None
    finally:
        os.close(descriptor)
    return False


def remove_stale_files(folder: Path) -> None:
    """Remove lock files that are no longer locked. The caller must be inside a transaction."""
    with contextlib.suppress(OSError, PodError):
        for file in (folder / HOLDERS).iterdir():
            if not is_alive(folder, file.name):
                file.unlink()
