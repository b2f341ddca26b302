"""Folders of a job on one host; processes lock the folders while using them, then remove them.

Killed processes leave their folders behind. The next job of the same user on that host removes the
folders of killed processes. The lock on a folder tells whether a process uses the folder, even a
process in another container.
"""

import os
import time

from poprun_py.process_info import start_ticks

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterable

# The in-memory file system for files that programs map into their memory. On a disk, the kernel
# would write back each changed page of a mapped file.
SHARED_MEMORY = "/dev/shm"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# If another process removes a new folder before this process locks it, this process makes the
# folder again. This process tries for ten seconds: the other process may be suspended.
_MAKE_SECONDS = 10.0
_PAUSE_SECONDS = 0.005
_DAEMON = "daemon-"
_STATES = "states"
# The folder for states of a training has no lock while the job restarts and no program has used the
# folder yet. The jobs of other launchers keep such a folder for this long.
_RESTART_SECONDS = 120.0


def folder_name(kind: str, secret: bytes = b"") -> str:
    """Return a folder name that other users cannot guess, because it contains a random secret.

    ``kind`` is ``PID``, ``files-PID``, ``host``, ``job`` or ``states``, where PID is a process id.
    ``secret`` has six bytes.
    """
    return f"poprun-{kind}-{(secret or os.urandom(6)).hex()}"


def memory_folder_name(token: str) -> str:
    """Return the name of a job's folder in /dev/shm, which does not reveal the job's token."""
    from hmac import digest

    return folder_name("host", digest(token.encode(), b"folders", "sha256")[:6])


def is_job_folder(path: str) -> bool:
    """Return whether a path ends with the name of a job's folder."""
    return _process_in(os.path.basename(path)) is not None


def _process_in(name: str) -> int | None:
    """Return the process id in the name of a job's folder, 0 if missing; None for other names."""
    head, _, secret = name.rpartition("-")
    kind = head.removeprefix("poprun-")
    if kind == head or len(secret) != 12 or secret.strip("0123456789abcdef"):
        return None
    if kind in ("host", "job", _STATES):
        return 0
    pid = kind.removeprefix("files-")
    return int(pid) if pid.isdecimal() else None


class JobFolder:
    """A job's folder at the absolute path ``path``, which this process locks while using it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def make(cls, base: str, name: str) -> "JobFolder":
        """Create a folder that only this user can enter, if it does not exist; lock and return it.

        Raises:
            OSError: The folder cannot be created, or other users may enter it.
        """
        path = os.path.abspath(os.path.join(base, name))
        deadline = time.monotonic() + _MAKE_SECONDS
        while True:
            try:  # noqa: SIM105 (importing contextlib would take longer than this module)
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            try:
                return cls._lock(path)
            except (FileNotFoundError, BlockingIOError):
                if time.monotonic() >= deadline:
                    raise BlockingIOError(f"another process keeps removing {path}") from None
            time.sleep(_PAUSE_SECONDS)

    @classmethod
    def join(cls, path: str) -> "JobFolder | None":
        """Lock and return the launcher's folder at ``path``; None if this user cannot use it."""
        try:
            # A folder with any other name may not be a job's folder, and must not be removed.
            return cls._lock(path) if is_job_folder(path) else None
        except OSError:
            return None

    @classmethod
    def _lock(cls, path: str) -> "JobFolder":
        """Lock and return the job's folder at ``path``.

        Raises:
            FileNotFoundError: The folder does not exist, or another process has just removed it.
            BlockingIOError: Another process is removing the folder.
            PermissionError: The folder belongs to another user, or other users may enter it.
        """
        import fcntl

        folder = cls(path, os.open(path, _OPEN_FOLDER))
        try:
            status = os.fstat(folder.descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(
                    f"{path} belongs to another user, or other users can enter it"
                )
            try:
                fcntl.flock(folder.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # if the file system has no locks, no process removes abandoned folders
            if not folder._exists():
                raise FileNotFoundError(path)
        except BaseException:
            folder.close()
            raise
        return folder

    def record_daemon(self, files: str, pid: int) -> None:
        """Record that the MPI daemon with the process id ``pid`` keeps its files in ``files``.

        If the daemon is killed, its files are removed together with this job's folder.
        """
        started = start_ticks(pid)
        if files.startswith("/") and files.endswith(f".{pid}") and started:
            try:  # noqa: SIM105
                os.symlink(files, f"{_DAEMON}{pid}-{started}", dir_fd=self.descriptor)
            except OSError:
                pass  # another instance has already recorded the MPI daemon

    def leave(self, wait_seconds: float = 0.0) -> None:
        """Stop using the folder, and remove it if no other process uses it.

        Wait at most ``wait_seconds`` for a killed process that still holds its lock on the folder.
        The kernel may close the connections of a killed process before it releases the locks.
        """
        deadline = time.monotonic() + wait_seconds
        while self.descriptor >= 0:
            if _lock_alone(self.descriptor):
                self.remove()
            elif time.monotonic() >= deadline:
                self.close()
            else:
                time.sleep(_PAUSE_SECONDS)

    def remove(self) -> None:
        """Remove the folder, even if in use, and the files of recorded MPI daemons that ended."""
        if self.descriptor < 0:
            return
        try:
            for name in os.listdir(self.descriptor):
                if name.startswith(_DAEMON):
                    _remove_daemon_files(self.descriptor, name)
            _empty(self.descriptor)
            if self._exists():
                os.rmdir(self.path)
        except OSError:
            pass  # if a process still writes into the folder, the next job removes the folder
        self.close()

    def close(self) -> None:
        """Stop using the folder without removing it; a second call has no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _exists(self) -> bool:
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self.descriptor))


class CheckpointMemory:
    """The folder in memory for states of a training, which outlives the programs of an attempt.

    The first program that saves a state makes the folder at ``path``. Programs, wrappers and the
    launcher lock the folder while they use it.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path or os.path.join(SHARED_MEMORY, folder_name(_STATES))
        self._folder: JobFolder | None = None

    def hold(self) -> None:
        """Lock the folder if a program has made it, so that no other job removes it."""
        if self._folder is None:
            self._folder = JobFolder.join(self.path)

    def release(self, *, is_kept: bool, wait_seconds: float = 0.0) -> None:
        """Unlock the folder; unless ``is_kept``, remove it if no other process uses it.

        If the launcher was killed, ``wait_seconds`` is the longest wait for the launcher's lock.
        """
        self.hold()
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if is_kept:
            os.utime(folder.descriptor)  # the time from which other jobs count _RESTART_SECONDS
            folder.close()
        else:
            folder.leave(wait_seconds)


def use_folders(address: str, memory_folder: str, daemon: int) -> list[JobFolder]:
    """Lock and return the folders of a job on this host; a folder in /dev/shm comes last.

    The launcher at ``address`` has made the folders on its host. If the launcher may be on another
    host, ``memory_folder`` is the name of the job's folder in /dev/shm, else an empty text.
    ``daemon`` is the process id of MPI's daemon.
    """
    folders: list[JobFolder | None] = []
    daemon_files = os.environ.get("PMIX_SERVER_TMPDIR", "")
    if memory_folder:
        if is_job_folder(os.path.dirname(daemon_files)):
            # The launcher is on this host, although its address is a TCP address.
            folders.append(JobFolder.join(os.path.dirname(daemon_files)))
        try:  # noqa: SIM105
            folders.append(JobFolder.make(SHARED_MEMORY, memory_folder))
        except OSError:
            pass  # without a folder in /dev/shm, Open MPI uses its default folder
    else:
        private = os.path.dirname(address.partition(":")[2])
        in_memory = os.path.join(SHARED_MEMORY, os.path.basename(private))
        folders += [JobFolder.join(private), JobFolder.join(in_memory)]
    used = [folder for folder in folders if folder is not None]
    if used and not any(daemon_files.startswith(f"{folder.path}/") for folder in used):
        used[-1].record_daemon(daemon_files, daemon)
    return used


def folder_locations() -> list[str]:
    """Return the paths of this host in which jobs make their folders, such as /tmp."""
    own = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    return list(dict.fromkeys((own, "/tmp", SHARED_MEMORY)))


def remove_abandoned(locations: "Iterable[str]", dead: int = 0) -> None:
    """Remove the job folders in ``locations`` that belong to this user and that no process uses.

    If ``dead`` is the process id of an ended launcher, only that launcher's folders are removed.
    """
    for location in locations:
        try:
            names = os.listdir(location)
        except OSError:
            continue
        for name in names:
            pid = _process_in(name)
            if pid is None or (dead and pid != dead):
                continue
            # Launchers of earlier versions do not lock their folders, so a folder is kept while the
            # process in its name is alive.
            path = os.path.join(location, name)
            if (dead or not pid or start_ticks(pid) is None) and not _may_restart(path):
                _remove_unused(path)


def _may_restart(path: str) -> bool:
    """Return whether a path is a folder with states, from which a job may be restarting now."""
    if not os.path.basename(path).startswith(f"poprun-{_STATES}-"):
        return False
    try:
        return time.time() < os.stat(path).st_mtime + _RESTART_SECONDS
    except OSError:
        return False


def _remove_unused(path: str) -> None:
    try:
        folder = JobFolder(path, os.open(path, _OPEN_FOLDER))
    except OSError:
        return
    if os.fstat(folder.descriptor).st_uid == os.geteuid():
        folder.leave()
    folder.close()


def _lock_alone(descriptor: int) -> bool:
    """Lock a folder against all other processes; return False if it is locked already."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _empty(folder: int) -> None:
    """Remove the content of an open folder, whose path may no longer exist."""
    # shutil is not used: its import would delay the end of a job on remote hosts by 20 ms.
    for _, folders, files, parent in os.fwalk(".", topdown=False, dir_fd=folder):
        for remove, names in ((os.unlink, files + folders), (os.rmdir, folders)):
            for name in names:
                try:  # noqa: SIM105
                    remove(name, dir_fd=parent)
                except OSError:
                    pass  # os.unlink fails for a folder, os.rmdir for a symbolic link to a folder


def _remove_daemon_files(folder: int, link: str) -> None:
    """Remove the files that ``record_daemon`` recorded for an MPI daemon, if it has ended."""
    try:
        files = os.readlink(link, dir_fd=folder)
        is_ours = os.lstat(files).st_uid == os.geteuid()
    except OSError:
        return
    pid, _, started = link.removeprefix(_DAEMON).partition("-")
    has_ended = pid.isdecimal() and str(start_ticks(int(pid))) != started
    if is_ours and has_ended and files.endswith(f".{pid}"):
        import shutil

        shutil.rmtree(files, ignore_errors=True)
