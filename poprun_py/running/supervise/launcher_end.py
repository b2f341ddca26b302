"""The end of another launcher's job: SIGTERM to its launcher, and the wait for the launcher's end.

A process id may be reused after the end of a launcher. This module therefore signals a process only
if the kernel names this process as the owner of the launcher's socket, or if the process has the
known start time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from poprun_py import process_info
from poprun_py.display.formatting import printable, read_json
from poprun_py.instance import control_protocol

# The time in which the kernel accepts a connection to a launcher, even a stopped one.
_CONNECT_SECONDS = 1.0
# The pause between two checks of a process, on a system without pidfds.
_POLL_SECONDS = 0.05
_CREDENTIALS = struct.Struct("3i")  # the kernel's struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, as reported by its launcher.

    Attributes:
        exit_code: The exit code of the job; None if the launcher has not reported one.
        reason: Why the job ended; empty without a reason.
    """

    exit_code: int | None = None
    reason: str = ""


class EndingLauncher:
    """A launcher that this process asks to end, and for whose end it waits.

    Use the object as a context manager, which closes its descriptors.

    Args:
        pid: The process id of the launcher.
        path: The launcher's socket; None for a launcher that runs no programs now.
        start_ticks: The start time of a launcher without a socket.

    Raises:
        ProcessLookupError: The launcher has ended. Another process may have its process id.
    """

    def __init__(self, pid: int, path: Path | None, start_ticks: int = 0) -> None:
        self.pid = pid
        self._channel: socket.socket | None = None
        with contextlib.ExitStack() as opened:
            self._descriptor = _open_process(pid)
            if self._descriptor is not None:
                opened.callback(os.close, self._descriptor)
            self._start_ticks = process_info.start_ticks(pid)
            if path is not None:
                self._channel = opened.enter_context(_connect(path, pid))
            elif self._start_ticks != start_ticks:
                raise ProcessLookupError(f"process {pid} has another start time")
            self._opened = opened.pop_all()

    def end(self) -> None:
        """Ask the job to end, as SIGTERM does, and continue a launcher that is stopped (Ctrl-Z).

        Raises:
            OSError: The process has ended, or this user may not signal it.
        """
        if self._channel is not None:
            with contextlib.suppress(OSError):
                question = json.dumps("end").encode()
                self._channel.sendall(control_protocol.pack(control_protocol.INSPECT, question))
        self._signal(signal.SIGTERM)
        if process_info.state_letter(self.pid) in "Tt":
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._descriptor is not None:
            signal.pidfd_send_signal(self._descriptor, number)
        elif process_info.start_ticks(self.pid) == self._start_ticks:
            os.kill(self.pid, number)

    def wait(self, seconds: float | None) -> bool:
        """Wait until the launcher has ended; return False if it still runs after ``seconds``."""
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1e3))
        deadline = None if seconds is None else time.monotonic() + seconds
        while process_info.start_ticks(self.pid) == self._start_ticks:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def told_end(self) -> JobEnd:
        """Return how the job has ended, as its launcher told it; call this after ``wait``."""
        reader, payloads = control_protocol.Reader(), []
        if self._channel is None:
            return JobEnd()
        with contextlib.suppress(OSError, ValueError):
            while data := self._channel.recv(1 << 16):
                payloads += [payload for _, payload in reader.feed(data)]
        return parse_end(b"".join(payloads))

    def __enter__(self) -> EndingLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def parse_end(answer: bytes) -> JobEnd:
    """Return the end that a launcher's answer tells; an older launcher does not tell any."""
    try:
        end = read_json(answer.decode())
        code, reason = end["exit_code"], end["reason"]
        # After a failure the launcher may restart the job, so this exit code is not the last.
        if type(code) is not int or not isinstance(reason, str) or end["may_restart"]:
            return JobEnd()
    except (KeyError, TypeError, ValueError, RecursionError):
        return JobEnd()
    return JobEnd(code, printable(reason))


def _open_process(pid: int) -> int | None:
    """Return a pidfd, which keeps naming this process; None if the system has no pidfds.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _connect(path: Path, pid: int) -> socket.socket:
    """Connect to a launcher's socket.

    Raises:
        ProcessLookupError: The socket does not belong to process ``pid``, or no process listens.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(_CONNECT_SECONDS)
        channel.connect(str(path))
        data = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        channel.close()
        raise ProcessLookupError(f"no process listens at {path}") from error
    if _CREDENTIALS.unpack(data)[0] != pid:
        channel.close()
        raise ProcessLookupError(f"another process than {pid} listens at {path}")
    return channel
