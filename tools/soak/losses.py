"""Kinds of loss for a training on the lab's hosts: what is killed or cut off, and for how long."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.lab import Lab, LabHost

# A host without power is switched on again after this time, and a wrapper's daemon needs less.
HOST_OFF_SECONDS = 5.0
SHORT_SECONDS, LONG_SECONDS = 1.0, 20.0


@dataclass(frozen=True)
class Program:
    """A program of the training: its process id on this machine, and the host that it runs on."""

    pid: int
    host: LabHost


@dataclass(frozen=True)
class Undone:
    """How a loss ends: a function, and the time in seconds after the loss."""

    after: float
    act: Callable[[], None]


@dataclass(frozen=True)
class Loss:
    """A kind of loss.

    Attributes:
        title: The name in the record and in the table.
        weight: How often the kind is drawn, compared with the others.
        act: Causes the loss and returns how it ends, if it must be ended.
        spares_first_host: Whether the kind never meets the host of the launcher.
    """

    title: str
    weight: int
    act: Callable[[Lab, list[Program], Program], Undone | None]
    spares_first_host: bool = False


def programs(lab: Lab, notes: Path) -> list[Program]:
    """Return the living programs of the training, by the notes that they wrote at their start."""
    pids = {host.name: _pids_inside(host) for host in lab.hosts if host.is_alive}
    hosts = {host.name: host for host in lab.hosts}
    found = []
    for path in sorted(notes.glob("instance-*")):
        starts = [line for line in path.read_text().splitlines() if line.startswith("start ")]
        name, inside = starts[-1].split()[3:5] if starts else ("", "0")
        pid = pids.get(name, {}).get(int(inside))
        if pid is not None:
            found.append(Program(pid, hosts[name]))
    return found


def _pids_inside(host: LabHost) -> dict[int, int]:
    """Return the process ids on this machine of a host's processes, by their ids on the host."""
    found = {}
    namespace = _namespace(host.init_pid)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _namespace(entry.name) == namespace:
                status = (entry / "status").read_text()
                inside = status.partition("NSpid:")[2].splitlines()[0].split()[-1]
                found[int(inside)] = int(entry.name)
    return found


def _namespace(pid: int | str) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def draw(kinds: tuple[Loss, ...], dice: random.Random) -> Loss:
    """Return a kind of loss, drawn by weight."""
    return dice.choices(kinds, [kind.weight for kind in kinds])[0]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _instance(lab: Lab, running: list[Program], target: Program) -> None:
    _kill(target.pid)


def _instances_of_host(lab: Lab, running: list[Program], target: Program) -> None:
    for program in running:
        if program.host is target.host:
            _kill(program.pid)


def _all_instances(lab: Lab, running: list[Program], target: Program) -> None:
    for program in running:
        _kill(program.pid)


def _wrapper(lab: Lab, running: list[Program], target: Program) -> None:
    stat = Path(f"/proc/{target.pid}/stat").read_text()
    _kill(int(stat.rpartition(")")[2].split()[1]))


def _host(lab: Lab, running: list[Program], target: Program) -> Undone:
    index = lab.hosts.index(target.host)
    target.host.kill()
    return Undone(HOST_OFF_SECONDS, lambda: lab.switch_on(index))


def _link(seconds: float) -> Callable[[Lab, list[Program], Program], Undone]:
    def act(lab: Lab, running: list[Program], target: Program) -> Undone:
        target.host.link("down")
        return Undone(seconds, lambda: target.host.link("up"))

    return act


LOSSES = (
    Loss("an instance", 8, _instance),
    Loss("all instances of a host", 4, _instances_of_host),
    Loss("all instances", 2, _all_instances),
    Loss("a wrapper", 4, _wrapper),
    Loss("a host, back after 5 s", 3, _host, spares_first_host=True),
    Loss("a host's link for 1 s", 2, _link(SHORT_SECONDS)),
    Loss("a host's link for 20 s", 1, _link(LONG_SECONDS), spares_first_host=True),
)
