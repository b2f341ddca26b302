"""Compares the machine before and after: what a run of everything has left behind.

``python tools/machine_state.py snapshot FILE`` writes down what is there; ``compare FILE`` lists
what has come since, and exits with 1 if that is anything. It looks at temporary folders and the
home's top level, processes, sockets, mounts, and networks. Linux, standard library only.
"""

from __future__ import annotations

import argparse
import fnmatch
import ipaddress
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ALLOWED = (
    # kind, pattern, why it may be there
    ("home", ".cache", "pip, uv, torch and browsers keep downloads and what they compiled"),
    ("file", "/dev/shm/poprun-py-leases", "the folder that all users' jobs share stays, empty"),
    # Tests take the folder of TMPDIR away from programs, whose libraries then turn to /tmp.
    ("file", "/tmp/torchinductor_*", "torch keeps what it compiled for the next program"),
    ("file", "/tmp/torchelastic_*", "torchrun's logs, which it leaves where it is ended"),
    ("file", "/tmp/pymp-*", "multiprocessing removes it at exit, which a killed Python never has"),
)
# Of a command line, which for mpirun has thousands.
_SHOWN_CHARACTERS = 160
# What is about to end may do so: nobody waits for the last processes of a program.
_PATIENCE_SECONDS = 10.0
_LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

State = dict[str, list[str]]


def state(root: Path = Path("/")) -> State:
    """Return what is there, by kind; ``root`` is where the file system begins."""
    return {
        "file": sorted(_files(root)),
        "home": sorted(_names(_below(root, str(Path.home())))),
        "process": sorted(_processes(root / "proc")),
        "listening socket": sorted(_listening(root / "proc/net")),
        "Unix socket": sorted(_unix_sockets(root / "proc/net/unix")),
        "mount": sorted(_mounts(root / "proc/self/mountinfo")),
        "network namespace": sorted(_names(root / "run/netns")),
        "network interface": sorted(_names(root / "sys/class/net")),
    }


def left(before: State, now: State) -> list[tuple[str, str]]:
    """Return the kind and the text of everything that is new and not allowed."""
    return [
        (kind, text)
        for kind, texts in now.items()
        for text in texts
        if text not in set(before.get(kind, ())) and not _is_allowed(kind, text)
    ]


def main(words: list[str] | None = None, look: Callable[[], State] = state) -> int:
    """Write or compare a snapshot; return 1 if something is new."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("snapshot", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--patience", type=float, default=_PATIENCE_SECONDS, help="seconds")
    asked = parser.parse_args(words)
    if asked.action == "snapshot":
        asked.file.touch()  # it may lie in a folder that is looked into
        asked.file.write_text(json.dumps(look(), indent=1))
        return 0
    before = json.loads(asked.file.read_text())
    deadline = time.monotonic() + asked.patience
    while (found := left(before, look())) and time.monotonic() < deadline:
        time.sleep(0.1)
    for kind, text in found:
        sys.stdout.write(f"left behind: {kind} {text}\n")
    return 1 if found else 0


def _is_allowed(kind: str, text: str) -> bool:
    return any(kind == each and fnmatch.fnmatch(text, pattern) for each, pattern, _ in ALLOWED)


# --- what is there --------------------------------------------------------------------------


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (names)
    except OSError:
        return []


def _files(root: Path) -> Iterator[str]:
    for folder in {"/tmp", "/dev/shm", "/var/tmp", tempfile.gettempdir()}:
        yield from (f"{folder}/{name}" for name in _names(_below(root, folder)))


def _processes(proc: Path) -> Iterator[str]:
    """Yield each process but this one with its id and start, which tell it from a later one."""
    for pid in filter(str.isdigit, _names(proc)):
        try:
            fields = (proc / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()
            words = (proc / pid / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        # Threads of the kernel have no words; what has ended and is not collected holds nothing.
        if words and int(pid) != os.getpid():
            shown = " ".join(words.decode(errors="replace").split())[:_SHOWN_CHARACTERS]
            yield f"{pid} (started at {fields[19]}): {shown}"


def _listening(net: Path) -> Iterator[str]:
    for name, listening in _LISTENING.items():
        for line in _lines(net / name)[1:]:
            address, _, port = line.split()[1].partition(":")
            if line.split()[3] == listening:
                yield f"{name} {_host(address)} port {int(port, 16)}"


def _host(address: str) -> str:
    """Return an address of /proc/net, whose words of four bytes are in the machine's order."""
    words = bytes.fromhex(address)
    packed = b"".join(words[i : i + 4][:: 1 if sys.byteorder == "big" else -1]
                      for i in range(0, len(words), 4))  # fmt: skip
    return str(ipaddress.ip_address(packed))


def _unix_sockets(table: Path) -> set[str]:
    """Return the paths of sockets that are open; ``@`` begins a name outside the file system."""
    paths = {line.split(maxsplit=7)[7] for line in _lines(table)[1:] if len(line.split()) > 7}
    return {path for path in paths if path.startswith("/")}


def _mounts(table: Path) -> Iterator[str]:
    for line in _lines(table):
        before, _, after = line.partition(" - ")
        number, *_, path = before.split()[:5]
        yield f"{path} ({after.split()[0]}, number {number})"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
