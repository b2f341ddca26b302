"""Getting the stacks of a running job from its launcher, for ``--stacks PID``."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from poprun_py.errors import StartError
from poprun_py.instance import protocol
from poprun_py.supervision.private_folder import SOCKET_NAME, folder_prefix

__all__ = ["ask"]

_ANSWER_SECONDS = 10.0


def ask(pid: int) -> str:
    """Return the stacks of the running job that process ``pid`` launches or belongs to.

    Raises:
        StartError: there is no such job, or its launcher does not answer.
    """
    path = _socket_of(pid)
    reader = protocol.Reader()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(_ANSWER_SECONDS)
            channel.connect(str(path))
            channel.sendall(protocol.pack(protocol.INSPECT, json.dumps("stacks").encode()))
            while data := channel.recv(1 << 16):
                for _, payload in reader.feed(data):
                    return str(payload.decode())
    except (OSError, ValueError) as error:
        raise StartError(f"--stacks {pid}: the launcher does not answer ({error})") from None
    raise StartError(f"--stacks {pid}: the job has just ended")


def _socket_of(pid: int) -> Path:
    """Find the launcher's socket: ``pid`` is the launcher, or a descendant of it."""
    current = pid
    while current > 1:
        for folder in _temporary_folders(current):
            for path in folder.glob(f"{folder_prefix(current)}*/{SOCKET_NAME}"):
                return path
        try:
            fields = Path(f"/proc/{current}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            break
        current = int(fields[1])
    raise StartError(
        f"--stacks {pid}: no job of yours; expected the process id of a running poprun-py on this "
        "host, or of one of its instances"
    )


def _temporary_folders(pid: int) -> set[Path]:
    """Return where a launcher with this process id may have its private folder."""
    import tempfile

    folders = {Path(tempfile.gettempdir()), Path("/tmp")}
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return folders
    theirs = (word.removeprefix(b"TMPDIR=") for word in words if word.startswith(b"TMPDIR=/"))
    return folders | {Path(os.fsdecode(each)) for each in theirs}
