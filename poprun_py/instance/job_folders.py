"""Folders of a job on one host: who uses one has it locked, and who uses it last removes it.

What killed processes could not remove is swept by the next job of the same user on that host: a
lock of the kernel tells whether anybody has a folder, in whatever container. The launcher and every
wrapper use this: standard library only, cheap to import, nothing is done at import.
"""

import os
import time

from poprun_py.process_info import start_ticks

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Files there are memory. What maps them needs that: on a disk every page would be written.
SHARED_MEMORY = "/dev/shm"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Another process may sweep the folder between its making and its locking: it is then made again.
# That process may be suspended with its lock on the folder, for longer than many tries take.
_MAKE_SECONDS = 10.0
_KINDS = ("host", "job")
_PAUSE_SECONDS = 0.005
_DAEMON = "daemon-"
# Where Open MPI puts files that its processes map: segments, and windows. The first is Open MPI
# 5's name, the second Open MPI 4's, which 5 takes as well, and in silence.
_BACKING = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_vader_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
    "OMPI_MCA_osc_ucx_backing_directory",
)


def folder_name(kind: str, secret: bytes = b"") -> str:
    """Return a name for a folder: ``kind`` is a process id, ``files-`` and one, host, or job.

    It cannot be guessed, and is the same again for the same ``secret``, of six bytes.
    """
    return f"poprun-{kind}-{(secret or os.urandom(6)).hex()}"


def is_job_folder(path: str) -> bool:
    """Tell whether a path is called as a folder of a job is."""
    return _number_in(os.path.basename(path)) is not None


def _number_in(name: str) -> int | None:
    """Return the process id in a name of ours, 0 if it has none; None for other names."""
    *kind, last = name.split("-")
    if kind[:1] != ["poprun"] or len(last) != 12 or last.strip("0123456789abcdef"):
        return None
    kind = kind[1:]
    if len(kind) == 1 and kind[0] in _KINDS:
        return 0
    if kind[:1] == ["files"]:
        kind = kind[1:]
    return int(kind[0]) if len(kind) == 1 and kind[0].isdecimal() else None


class JobFolder:
    """A folder that nobody sweeps while this process has it.

    ``path`` is where it is. Made by ``make`` and ``join``.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def make(cls, base: str, name: str) -> "JobFolder":
        """Make a folder that only this user can enter, or join others of the job in it.

        Raises:
            OSError: there can be none.
        """
        path = os.path.abspath(os.path.join(base, name))
        deadline = time.monotonic() + _MAKE_SECONDS
        while True:
            try:  # noqa: SIM105 (contextlib takes longer to import than all of this)
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            try:
                folder = cls._hold(path)
            except FileNotFoundError:
                folder = None
            if folder is not None:
                return folder
            if time.monotonic() >= deadline:
                raise BlockingIOError(f"{path} is swept again and again")
            time.sleep(_PAUSE_SECONDS)

    @classmethod
    def join(cls, path: str) -> "JobFolder | None":
        """Have a folder that the launcher made; None if there is none that is this user's."""
        try:
            # Others may lie around a socket that somebody else made.
            return cls._hold(path) if is_job_folder(path) else None
        except OSError:
            return None

    @classmethod
    def _hold(cls, path: str) -> "JobFolder | None":
        """Return the folder; None if it was removed meanwhile.

        Raises:
            OSError: it is not there, or others may write into it.
        """
        import fcntl

        descriptor = os.open(path, _FOLDER)
        folder = cls(path, descriptor)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(f"{path} is not this user's alone")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                folder.close()
                return None
            except OSError:
                pass  # without locks, as on some file systems, nobody sweeps
            if not folder._is_there():
                folder.close()
                return None
        except BaseException:
            folder.close()
            raise
        return folder

    def note_daemon(self, files: str, pid: int) -> None:
        """Write down where the parent of the instances, MPI's daemon ``pid``, keeps its files."""
        started = start_ticks(pid)
        if files.startswith("/") and files.endswith(f".{pid}") and started:
            try:  # noqa: SIM105
                os.symlink(files, f"{_DAEMON}{pid}-{started}", dir_fd=self._descriptor)
            except OSError:
                pass  # another instance did

    def leave(self, wait_seconds: float = 0.0) -> None:
        """Remove the folder if no other process has it; else it is theirs to remove.

        Args:
            wait_seconds: how long to wait for a killed process that still has the folder. The
                kernel may close its connections, by which others notice its end, before it closes
                its folders.
        """
        deadline = time.monotonic() + wait_seconds
        try:
            while self._descriptor >= 0:
                if _is_left(self._descriptor):
                    self.remove()
                elif time.monotonic() >= deadline:
                    return
                else:
                    time.sleep(_PAUSE_SECONDS)
        finally:
            self.close()

    def remove(self) -> None:
        """Remove the folder, whoever else has it, with what dead daemons left elsewhere."""
        if self._descriptor < 0:
            return
        _empty(self._descriptor)
        if self._is_there():
            try:  # noqa: SIM105
                os.rmdir(self.path)
            except OSError:
                pass  # somebody still writes into it: the next start removes it
        self.close()

    def close(self) -> None:
        """Leave the folder as it is; once more does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_there(self) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))


def memory_variables(folder: str | None, environ: "Mapping[str, str]") -> "dict[str, str | None]":
    """Return what keeps Open MPI's shared memory in ``folder``; None unsets what an outer job set.

    A place that the user chose stays.
    """
    return {
        name: folder for name in _BACKING if not environ.get(name) or is_job_folder(environ[name])
    }


def folder_locations() -> list[str]:
    """Return where folders of jobs may lie on this host, those for files and that in memory."""
    bases = (os.path.abspath(os.environ.get("TMPDIR") or "/tmp"), "/tmp", SHARED_MEMORY)
    return [base for number, base in enumerate(bases) if base not in bases[:number]]


def remove_abandoned(bases: "Iterable[str]", dead: int = 0) -> None:
    """Remove this user's folders in ``bases`` that no process has.

    Args:
        bases: the folders to look into.
        dead: the id of a launcher that has ended; its folders alone are then removed.
    """
    for base in bases:
        try:
            names = os.listdir(base)
        except OSError:
            continue
        for name in names:
            number = _number_in(name) if name.startswith("poprun-") else None
            if number is None or (dead and number != dead):
                continue
            # Launchers of earlier versions have no lock; who is collected later is dead, too.
            if dead or not number or not start_ticks(number):
                _sweep(os.path.join(base, name))


def _sweep(path: str) -> None:
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError:
        return
    folder = JobFolder(path, descriptor)
    if os.fstat(descriptor).st_uid == os.geteuid():
        folder.leave()
    else:
        folder.close()


def _is_left(descriptor: int) -> bool:
    """Tell whether no other process has a folder, and keep all others out of it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _empty(descriptor: int) -> None:
    """Remove everything in a folder; links are not followed, but for those of ``note_daemon``."""
    try:
        names = os.listdir(descriptor)
    except OSError:  # also where this process may open no more files
        return
    for name in names:
        try:
            if name.startswith(_DAEMON):
                _remove_files_of(name, os.readlink(name, dir_fd=descriptor))
            os.unlink(name, dir_fd=descriptor)
        except IsADirectoryError:
            _remove_folder(name, descriptor)
        except OSError:
            continue


def _remove_folder(name: str, within: "int | None" = None) -> None:
    """Remove a folder of this user."""
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=within)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                _empty(descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=within)
    except OSError:
        return


def _remove_files_of(daemon: str, files: str) -> None:
    """Remove what a dead daemon of MPI has left, as ``note_daemon`` wrote it down."""
    pid, _, started = daemon.removeprefix(_DAEMON).partition("-")
    if pid.isdecimal() and files.endswith(f".{pid}") and str(start_ticks(int(pid))) != started:
        _remove_folder(files)
