"""One job of a soak while it runs: its processes by what they are, and the phase that it is in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.soak.places import FourHosts, OneHost, family

Place = OneHost | FourHosts
KINDS = ("launcher", "mpirun", "daemon", "ssh", "wrapper", "program", "worker")
_POLL_SECONDS = 0.005


class MachineLoad:
    """How many processes wanted a core, sampled all the time: a process that waits is late."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=40_000)
        self._cores = len(os.sched_getaffinity(0))
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            running = Path("/proc/stat").read_text().partition("procs_running ")[2].split()[0]
            self._samples.append((time.monotonic(), int(running) / self._cores))
            time.sleep(0.05)

    def since(self, began: float) -> float:
        """Return how many times as long as on an idle machine something may have taken."""
        shares = [share for when, share in list(self._samples) if when >= began]
        return max(1.0, sum(shares) / len(shares)) if shares else 1.0


class Job:
    """A launch of the training.

    Args:
        place: where it runs.
        program: the training and its arguments, without the folder of checkpoints.
        name: of its files in the folder of the case; a case has several launches.
    """

    def __init__(self, place: Place, program: Sequence[object], name: str) -> None:
        self.place = place
        self.folder = place.folder
        self.notes = self.folder / f"notes-{name}"
        self.out = self.folder / name
        self.checkpoints = self.folder / "c"
        self._program = tuple(map(str, program))
        self.process: subprocess.Popen

    def start(
        self, options: Sequence[object], env: Mapping[str, str], before: Sequence[str] = ()
    ) -> None:
        """Start it."""
        self.notes.mkdir(parents=True, exist_ok=True)
        env = {"SOAK_NOTES": str(self.notes), **env}
        words = [*self.place.options(env), *options, *self._program, self.checkpoints]
        self.process = self.place.start(words, env, before, self.out)

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def wait(self, limit: float) -> int | None:
        """Return the launcher's code; None if it has not ended within ``limit`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit)
        return None

    def text(self, stream: str) -> str:
        """Return what the launcher has written to ``out`` or ``err``."""
        return Path(f"{self.out}.{stream}").read_text(errors="replace")

    # --- where it is ----------------------------------------------------------------------

    def noted(self, instance: int) -> list[str]:
        """Return the phases that an instance has begun, in order."""
        try:
            return [line.split()[0] for line in self._notes_of(instance).splitlines() if line]
        except OSError:
            return []

    def _notes_of(self, instance: int) -> str:
        return (self.notes / f"instance-{instance}").read_text()

    def phase(self, instance: int) -> str:
        """Return the phase that an instance is in."""
        return (self.noted(instance) or ["start"])[-1]

    def saved(self) -> int:
        """Return the step of the last checkpoint that was saved, as the one who saves tells."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in self._notes_of(0).splitlines()]
            ended = [int(words[1]) for words in lines[:-1] if words[:1] == ["checkpoint"]]
            return max(ended, default=0)
        return 0

    def wait_for(self, condition: Callable[[], object], limit: float = 60) -> bool:
        """Poll ``condition``; False if the job ends, or ``limit`` is over, before it holds."""
        deadline = time.monotonic() + limit
        while not condition():
            if self.is_over or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    # --- its processes --------------------------------------------------------------------

    def find(self, kind: str, instance: int) -> int | None:
        """Return the process of a kind, that of an instance or its host where there are several."""
        found = {pid: _words(pid) for pid in family([self.process.pid, *self.place.roots()])}
        # With checkpoints in memory, a wrapper's parents have the wrapper's command.
        starters = {_parent(pid) for pid, words in found.items() if _is_of_wrapper(words)}
        for pid, words in found.items():
            if kind == "wrapper" and pid in starters:
                continue
            if self._kind(words, found.get(_parent(pid), [])) != kind:
                continue
            if kind in ("launcher", "mpirun") or self._instance(kind, pid, words) == instance:
                return pid
        return None

    def _kind(self, words: list[str], parent: list[str]) -> str:
        """Return what a process is; its parent tells a worker from the program that forked it."""
        name = Path(words[0]).name if words else ""
        if name == "ssh":
            return "ssh" if any("prted" in word for word in words) else ""
        if name == "prted":
            return "daemon"
        if name in ("mpirun", "prterun"):
            return "mpirun"
        if "poprun_py" in words and "-m" in words and name.startswith("python"):
            return "launcher"
        if _is_of_wrapper(words):
            return "wrapper" if name.startswith("python") else ""
        if not name.startswith("python") or self._program[0] not in words:
            return ""
        return "worker" if parent == words else "program"

    def _instance(self, kind: str, pid: int, words: list[str]) -> int | None:
        """Return the instance that a process belongs to; daemons have that of their host."""
        if kind == "ssh":
            hosts = [host.name for host in self.place.lab.hosts]
            return next((hosts.index(word) for word in words if word in hosts), None)
        if kind == "daemon":
            return int(words[words.index("ess_base_vpid") + 1])
        name = "PMIX_RANK=" if kind == "wrapper" else "RANK="
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                if entry.startswith(name):
                    return int(entry.partition("=")[2])
        return None

    def send(self, number: int, pid: int) -> bool:
        """Send a signal; False if the process has ended."""
        if _state(pid) in "ZX":
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def close(self) -> None:
        """End the launcher."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def _is_of_wrapper(words: list[str]) -> bool:
    return any(word.endswith("poprun_py/instance/start_wrapper.py") for word in words)


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    return []


def _stat(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["X", "0"]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _state(pid: int) -> str:
    return _stat(pid)[0]
