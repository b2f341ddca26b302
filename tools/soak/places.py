"""Where the jobs of a soak run, each apart from all others: this machine, or four hosts of a lab.

On this machine a case has, as far as root permits, mounts of its own: its /dev/shm can be looked
at, and what a case mounts, fills or makes read-only is nobody else's. All of a case lies in one
folder, which is short because sockets have short names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.lab import Lab, LabHost

from tools.processes import survivors

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_MARK_OF_POPRUN"
_END_SECONDS = 10.0
# Leases of cores stay on purpose; what torch leaves is its own.
_KEPT = ("poprun-leases", "poprun-py-leases", "torchinductor_")


def family(roots: Sequence[int]) -> list[int]:
    """Return living processes and all that they have started."""
    pids = list(roots)
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def names_in(folder: Path) -> set[str]:
    """Return the names of what lies in a folder, without what is meant to stay."""
    with contextlib.suppress(OSError):
        return {each.name for each in folder.iterdir() if not each.name.startswith(_KEPT)}
    return set()


def _start(command: list[str], environ: dict[str, str], out: Path) -> subprocess.Popen:
    """Start a command whose stdout and stderr go to ``out``.out and ``out``.err."""
    with Path(f"{out}.out").open("wb") as stdout, Path(f"{out}.err").open("wb") as stderr:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ, cwd=ROOT
        )


def _processes_of(pid: str | int) -> int:
    """Return the number of the namespace that a process has its number in."""
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


@functools.cache
def may_unshare() -> bool:
    """Whether a case can have mounts of its own here."""
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


class OneHost:
    """This machine, for one case.

    Args:
        folder: for the files of the case; its name is short.
        mark: by which the processes of the case are recognised.
    """

    num_instances = 2

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self._mark = mark
        self._holder: subprocess.Popen | None = None
        self._undo: list[Callable[[], None]] = []
        for name in ("t", "shm", "leases"):
            (folder / name).mkdir(parents=True)
        if may_unshare():
            self._hold()

    def _hold(self) -> None:
        script = 'mount --bind "$0" /dev/shm && echo ready && exec sleep infinity'
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, str(self.folder / "shm")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as pipe:
            if pipe.readline() != b"ready\n":
                raise RuntimeError("no mounts of a case's own")

    def inside(self, path: Path) -> Path:
        """Return a path that the case sees as one that everybody sees."""
        if self._holder is None:
            return path
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def sh(self, script: str) -> None:
        """Run a line of shell where the case runs.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(self._enter(["sh", "-c", script]), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script}: {done.stderr.strip()}")

    def _enter(self, words: Sequence[object]) -> list[str]:
        inside = (
            ["nsenter", "-m", f"--wd={ROOT}", "-t", str(self._holder.pid)] if self._holder else []
        )
        return [*inside, *map(str, words)]

    def start(
        self, words: Sequence[object], env: Mapping[str, str], before: Sequence[str], out: Path
    ) -> subprocess.Popen:
        """Start ``poprun-py`` with ``words``; stdout and stderr go to ``out``.out and .err."""
        command = [*before, sys.executable, "-m", "poprun_py", *words]
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder / "t"),
            "XDG_CACHE_HOME": str(self.folder.parent / "cache"),
            "XDG_STATE_HOME": str(self.folder.parent / "state"),
            "POPRUN_LEASES": str(self.folder / "leases"),
            MARK: self._mark,
            **env,
        }
        return _start(self._enter(command), environ, out)

    def options(self, env: Mapping[str, str]) -> list[str]:
        """Return the launcher's options of this place."""
        return ["--num-instances", "2", "--num-replicas", "2"]

    def roots(self) -> list[int]:
        """Return the processes, besides the launcher, below which those of a job are."""
        return []

    def left(self) -> list[int]:
        """Return the processes of the case that are there."""
        return survivors(f"{MARK}={self._mark}")

    def left_files(self) -> list[str]:
        """Return what lies in its temporary folder and its shared memory."""
        folders = [self.folder / "t"] + ([Path("/dev/shm")] if self._holder else [])
        return sorted(
            f"{each.name}/{name}" for each in folders for name in names_in(self.inside(each))
        )

    def at_close(self, undo: Callable[[], None]) -> None:
        """Have something undone at the end, once no process of the case is there."""
        self._undo.append(undo)

    def close(self) -> None:
        """Remove everything of the case."""
        deadline = time.monotonic() + _END_SECONDS
        while (pids := self.left()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for undo in self._undo:
            undo()
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class FourHosts:
    """Four hosts on one switch, which cases use one after another.

    Args:
        folder: for everything; hosts see its parent.
    """

    num_instances = 4

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.base = folder
        self.lab = Lab(folder / "lab", self.num_instances)
        self.lab.__enter__()
        self._namespaces = {_processes_of(host.init_pid) for host in self.lab.hosts}
        self._before = set(self.left())
        self._files_before = set(self._files())
        self._mark = ""
        self.folder = folder

    def begin(self, folder: Path, mark: str) -> None:
        """Begin a case, whose files lie in ``folder``."""
        self.folder, self._mark = folder, mark
        folder.mkdir(parents=True)

    def inside(self, path: Path) -> Path:
        """Return a path that the case sees as one that everybody sees."""
        return path

    def host(self, instance: int) -> LabHost:
        """Return the host of an instance."""
        return self.lab[instance]

    def start(
        self, words: Sequence[object], env: Mapping[str, str], before: Sequence[str], out: Path
    ) -> subprocess.Popen:
        """Start ``poprun-py`` on the first host; stdout and stderr go to ``out``.out and .err."""
        host = self.lab[0]
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(host.folder / "cache"),
            "POPRUN_LEASES": "",
            MARK: self._mark,
            **env,
        }
        command = [*before, sys.executable, "-m", "poprun_py", *words]
        return _start(host.enter(*command), environ, out)

    def options(self, env: Mapping[str, str]) -> list[str]:
        """Return the launcher's options of this place."""
        count = str(self.num_instances)
        passed = [word for name in env for word in ("--env", name)]
        return [
            "--host",
            self.lab.names(),
            "--num-instances",
            count,
            "--num-replicas",
            count,
            *passed,
        ]

    def roots(self) -> list[int]:
        """Return the processes, besides the launcher, below which those of a job are."""
        return [host.init_pid for host in self.lab.hosts]

    def left(self) -> list[int]:
        """Return the processes on the hosts that a case has started, without those of sshd.

        How soon sshd notices that nobody is at the other end is its own settings' business.
        """
        found = []
        for pid in self._on_hosts():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sshd"):
                    continue
                state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
                if state not in (b"Z", b"X"):
                    found.append(pid)
        return [pid for pid in found if pid not in getattr(self, "_before", ())]

    def _on_hosts(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and _processes_of(entry.name) in self._namespaces:
                    yield int(entry.name)

    def _files(self) -> Iterator[str]:
        for host in self.lab.hosts:
            for folder in ("tmp", "dev/shm"):
                for name in names_in(Path(f"/proc/{host.init_pid}/root/{folder}")):
                    yield f"{host.name}:/{folder}/{name}"

    def left_files(self) -> list[str]:
        """Return what lies in the hosts' temporary folders and shared memory."""
        return sorted(set(self._files()) - self._files_before)

    def end(self) -> None:
        """End what a case has left, remove its files, and mend the network."""
        for host in self.lab.hosts:
            host.repair()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._files_before |= set(self._files())
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Switch all hosts off."""
        self.lab.close()
        shutil.rmtree(self.base, ignore_errors=True)
