"""A wrapper with its program, and the launcher's end of its control channel."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.repository import ROOT

from poprun_py.instance import control_protocol

START = ROOT / "poprun_py" / "instance" / "start_wrapper.py"


@contextlib.contextmanager
def wrapped(
    folder: Path, *command: str, **environ: str
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Start the wrapper of a program; give the launcher's end of its channel, and its process.

    The process is killed at the end if it has not ended by itself.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        variables = {"POPRUN_CONTROL": f"unix:{folder}/control", "RANK": "1", **environ}
        wrapper = subprocess.Popen(
            [sys.executable, "-I", "-S", START, "--", *command], env={**os.environ, **variables}
        )
        try:
            with listener.accept()[0] as channel:
                channel.settimeout(60)
                yield channel, wrapper
        finally:
            wrapper.kill()
            wrapper.wait()


def frames(channel: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the payload of each frame until the wrapper closes the channel."""
    reader = control_protocol.Reader()
    while data := channel.recv(1 << 16):
        yield from reader.feed(data)
