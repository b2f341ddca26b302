"""What a host says about itself: sent to its Python through ssh, prints one line of JSON.

Standard library only and complete in this one file, because the host may have nothing else of ours.
``main`` takes a JSON object: ``root`` (the folder that holds our packages), ``program`` (a file
that must be readable, or ""), ``folder`` (the working folder), ``mpirun``, ``call_back`` (the
launcher's ``[address, port]``, or null) and ``packages`` (distributions to look for): the fields of
``Request`` in host_report.py. ``leases``: whether to tell which jobs hold which CPUs here.
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
    """Return everything about this host as JSON values."""
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
    """Return the version of an installed distribution; empty if there is none."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def version_of_poprun(root: str) -> str:
    """Return the version written in our package under ``root``; empty if it is not there."""
    try:
        text = Path(root, "poprun_py", "__init__.py").read_text(encoding="utf-8")
        return next(s for s in text.splitlines() if s.startswith("__version__")).split('"')[1]
    except (OSError, IndexError, StopIteration):
        return ""


def version_of_mpirun(path: str) -> str:
    """Return the first line of ``mpirun --version``; empty if it does not run."""
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
    said = (done.stdout + done.stderr).decode(errors="replace").strip()
    return said.splitlines()[0] if said and done.returncode == 0 else ""


def state_of(path: str) -> str:
    """Return ``ok``, ``missing`` or ``unreadable``; an empty path is ok."""
    if not path or os.access(path, os.R_OK):
        return "ok"
    return "unreadable" if Path(path).exists() else "missing"


def networks() -> list[list[Any]]:
    """Return ``[interface, address, bits of the mask, is bridge]`` of every address that is up.

    Of IPv6 those that other hosts reach, and no temporary ones: after the IPv4 addresses.
    """
    import fcntl
    import struct

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(probe, 0x8913, request)[16:18])[0]
                address = fcntl.ioctl(probe, 0x8915, request)[20:24]
                mask = fcntl.ioctl(probe, 0x891B, request)[20:24]
            except OSError:
                continue  # no IPv4 address
            if flags & 1:
                bits = bin(int.from_bytes(mask, "big")).count("1")
                bridge = Path("/sys/class/net", name, "bridge").is_dir()
                addresses.append([name, socket.inet_ntoa(address), bits, bridge])
    return addresses + ipv6_networks()


def ipv6_networks() -> list[list[Any]]:
    """Return what ``networks`` does, of IPv6 alone: the kernel lists addresses that are up."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    addresses = []
    for line in lines:
        number, _, bits, scope, flags, name = line.split()
        # Global ones; not temporary (1), not given up (0x20), not tentative (0x40) or refused (8).
        if scope == "00" and not int(flags, 16) & 0x69:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
            bridge = Path("/sys/class/net", name, "bridge").is_dir()
            addresses.append([name, address, int(bits, 16), bridge])
    return addresses


def has_fabric() -> bool:
    """Tell whether MPI has something faster than TCP here, such as InfiniBand."""
    classes = (Path("/sys/class", name) for name in ("infiniband", "cxi", "hfi1"))
    return any(True for folder in classes if folder.is_dir() for _ in folder.iterdir())


def available_memory() -> int | None:
    """Return the bytes of memory that programs can get now; None if the kernel does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        line = next(s for s in text.splitlines() if s.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, StopIteration):
        return None


def free_space(path: str) -> int | None:
    """Return the free bytes of a file system; None if it is not there."""
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def open_files(*, hard: bool = False) -> int | None:
    """Return how many files a process may have open; None for no limit.

    With ``hard``, return the hard limit, up to which a process may raise its own. The launcher
    raises its limit for mpirun; MPI's daemon on another host does not raise its own.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[int(hard)]
    return None if limit == resource.RLIM_INFINITY else limit


def machine(root: str) -> Any:
    """Return the hardware as our own reader describes it; None where it cannot be read."""
    sys.path.insert(0, root)
    try:
        from poprun_py.machines.hardware_reader import read_machine

        return read_machine().to_json()
    except Exception:  # whatever is wrong there shows in the other values
        return None


def leases(root: str) -> Any:
    """Return who holds CPUs of this host, and who waits for some; None where nobody can tell."""
    sys.path.insert(0, root)
    try:
        from poprun_py.machines.leases import list_for_launcher

        return list_for_launcher(os.environ)
    except Exception:  # taking a lease here says what is wrong
        return None


def called_back(address: list[Any] | None) -> bool | None:
    """Tell whether the launcher can be reached from here; None if that was not asked."""
    if address is None:
        return None
    try:
        socket.create_connection(tuple(address), 3).close()
    except OSError:
        return False
    return True


def main(request: Mapping[str, Any]) -> None:
    """Print the report; the mark tells it from whatever a login shell prints."""
    sys.stdout.write("\n" + MARK + json.dumps(report(request)) + "\n")
