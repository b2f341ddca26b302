"""What processes listen on, as the kernel tells it, free ports, and the MPIs of this machine.

The kernel lists sockets by network namespace, so hosts of the lab are seen from outside.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Listening", "all_in_network_of", "an_mpi", "free_port", "of_processes"]

# Folders of MPIs or paths of mpirun, as --mpi takes them.
_OTHERS = (*os.environ.get("TEST_MPIS", "").split(os.pathsep), "/usr/bin/mpirun.openmpi",
           "/usr/bin/mpirun.mpich", "/usr/bin/mpirun")  # fmt: skip
_LISTEN = "0A"
_PORTS_OF_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Listening:
    """One socket of one process that accepts connections."""

    pid: int
    name: str
    address: str
    port: int


def free_port() -> int:
    """Return a port that is free, below those that the kernel gives to whoever names none.

    A free one of the kernel's could be another test's before this one uses it.
    """
    lowest = int(_PORTS_OF_THE_KERNEL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(lowest, 20_000))
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def of_processes(pids: list[int]) -> list[Listening]:
    """Return what processes, which share a network namespace, listen on."""
    return [*_found(pids, pids[0])]


def all_in_network_of(pid: int) -> list[Listening]:
    """Return what all processes that have the network of ``pid`` listen on."""
    network = _link(f"/proc/{pid}/ns/net")
    everyone = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [*_found([each for each in everyone if _link(f"/proc/{each}/ns/net") == network], pid)]


def _found(pids: list[int], one: int) -> Iterator[Listening]:
    sockets = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{one}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN:
                number, _, port = words[1].partition(":")
                sockets[f"socket:[{words[9]}]"] = (_address(number), int(port, 16))
    for pid in pids:
        try:
            links = {_link(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # it has ended
        for link in sorted(links & sockets.keys()):
            yield Listening(pid, name, *sockets[link])


def _link(path: Path | str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _address(number: str) -> str:
    """Return an address that the kernel wrote as words in this machine's order of bytes."""
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in re.findall("." * 8, number))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def an_mpi(kind: str) -> tuple[str, ...]:
    """Return the options for an MPI: that of this environment, "Open MPI 4" or "MPICH"; or skip."""
    if kind == "Open MPI 5":
        return ()
    for path in filter(None, _OTHERS):
        program = next((p for p in (f"{path}/bin/mpirun", path) if os.access(p, os.X_OK)), "")
        if program and Path(program).is_file() and _is(kind, program):
            return ("--mpi", path)
    pytest.skip(f"no {kind} here: name its folder in TEST_MPIS (a venv with the wheel will do)")


def _is(kind: str, program: str) -> bool:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    found = re.search(r"\((?:Open MPI|OpenRTE)\) (\d)", said.stdout)
    return kind == (f"Open MPI {found[1]}" if found else "MPICH")
