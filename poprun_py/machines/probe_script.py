"""The program that a probe runs on another host, to print facts about the host as a line of JSON.

host_reports.py sends this file to the host's Python through ssh. The probe uses the standard
library only, because poprun-py may be missing on the host. The function ``main`` takes the fields
of a ``ProbeRequest`` as a mapping.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "poprun-probe "


def report(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about this host as JSON values."""
    root = request["root"]
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: version_of(name) for name in request["packages"]},
        "poprun": version_of_poprun(root),
        "mpirun": version_of_mpirun(request["mpirun"]),
        "program": state_of(request["program"]),
        "folder": Path(request["folder"]).is_dir(),
        "networks": networks(),
        "fabric": has_fabric(),
        "memory": available_memory(),
        "shm": free_space("/dev/shm"),
        "files": open_files(),
        "machine": machine(root),
        "leases": leases(root) if request["leases"] else [],
        "called_back": called_back(request["call_back"]),
    }


def version_of(name: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def version_of_poprun(root: str) -> str:
    """Return the version of the poprun-py package in ``root``; empty if it is missing."""
    try:
        text = Path(root, "poprun_py", "__init__.py").read_text(encoding="utf-8")
        return next(s for s in text.splitlines() if s.startswith("__version__")).split('"')[1]
    except (OSError, IndexError, StopIteration):
        return ""


def version_of_mpirun(path: str) -> str:
    """Return the first line that ``mpirun --version`` prints; empty if mpirun cannot be run."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    output = (done.stdout + done.stderr).decode(errors="replace").strip()
    return output.splitlines()[0] if output and done.returncode == 0 else ""


def state_of(path: str) -> str:
    """Return whether a file is ``ok``, ``missing`` or ``unreadable``; an empty path is ``ok``."""
    if not path or os.access(path, os.R_OK):
        return "ok"
    return "unreadable" if Path(path).exists() else "missing"


def networks() -> list[list[Any]]:
    """Return a list ``[interface, address, mask bits, is bridge]`` for each usable address.

    IPv4 addresses are first in the list. IPv6 addresses are listed if global and permanent.
    """
    import fcntl
    import struct

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(any_socket, 0x8913, request)[16:18])[0]
                address = fcntl.ioctl(any_socket, 0x8915, request)[20:24]
                mask = fcntl.ioctl(any_socket, 0x891B, request)[20:24]
            except OSError:
                continue  # the interface has no IPv4 address
            if flags & 1:
                bits = bin(int.from_bytes(mask, "big")).count("1")
                bridge = Path("/sys/class/net", name, "bridge").is_dir()
                addresses.append([name, socket.inet_ntoa(address), bits, bridge])
    return addresses + ipv6_networks()


def ipv6_networks() -> list[list[Any]]:
    """Return the global, permanent IPv6 addresses of this host in the format of ``networks()``."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    addresses = []
    for line in lines:
        number, _, bits, scope, flags, name = line.split()
        # The scope 00 means a global IPv6 address. IPv6 addresses with one of these flags are left
        # out: temporary (1), duplicate (8), deprecated (0x20) and tentative (0x40).
        if scope == "00" and not int(flags, 16) & 0x69:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
            bridge = Path("/sys/class/net", name, "bridge").is_dir()
            addresses.append([name, address, int(bits, 16), bridge])
    return addresses


def has_fabric() -> bool:
    """Return whether this host has a network that is faster than TCP, such as InfiniBand."""
    classes = (Path("/sys/class", name) for name in ("infiniband", "cxi", "hfi1"))
    return any(True for folder in classes if folder.is_dir() for _ in folder.iterdir())


def available_memory() -> int | None:
    """Return the bytes of memory that programs can allocate now; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        line = next(s for s in text.splitlines() if s.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, StopIteration):
        return None


def free_space(path: str) -> int | None:
    """Return the free bytes of the file system at ``path``; None if the path is missing."""
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def open_files(*, hard: bool = False) -> int | None:
    """Return how many files a process may have open; None for no limit.

    Args:
        hard: Whether to return the hard limit instead of the soft limit. The launcher raises its
            soft limit to the hard limit for mpirun, but MPI's daemons on other hosts keep their
            soft limit.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[int(hard)]
    return None if limit == resource.RLIM_INFINITY else limit


def machine(root: str) -> Any:
    """Return this host's hardware as JSON values for ``Machine``; None if it cannot be read."""
    sys.path.insert(0, root)
    try:
        from poprun_py.machines.machine_reader import read_machine

        return read_machine().to_json()
    except Exception:  # other facts in the report show why poprun-py cannot be used here
        return None


def leases(root: str) -> Any:
    """Return the leases and waiting jobs of this host; None if they cannot be read."""
    sys.path.insert(0, root)
    try:
        from poprun_py.machines.remote_leases import list_for_launcher

        return list_for_launcher(os.environ)
    except Exception:  # a later attempt to take a lease on this host will report the error
        return None


def called_back(address: list[Any] | None) -> bool | None:
    """Return whether this host can connect to the launcher; None if no address is given."""
    if address is None:
        return None
    try:
        socket.create_connection(tuple(address), 3).close()
    except OSError:
        return False
    return True


def main(request: Mapping[str, Any]) -> None:
    """Print the facts about this host as one line of JSON.

    The line starts with ``MARK``, because a login shell may print other lines.
    """
    sys.stdout.write("\n" + MARK + json.dumps(report(request)) + "\n")
