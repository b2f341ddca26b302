"""Messages between a program and the launcher process of its job, over a pair of sockets.

A message is a length in four bytes, then a pickled pair of kind and value. Unpickling is safe here,
because both processes belong to one user, and other processes cannot connect to the sockets.
Messages contain data of the instances only as text and numbers.

The program sends one message, ``request`` (a JobRequest). The launcher process sends messages of
these kinds:

    waiting               the resources that the job waits for, as text; empty after the wait
    attempt               an Attempt, sent when the attempt begins
    log, warn, binding    one line each, if the request names this kind
    result, error         a LaunchResult or a LaunchError, as the last message
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poprun_py.options.launch_config import LaunchConfig
    from poprun_py.planning.launch_plan import LaunchPlan

_LENGTH_BYTES = 4
_FIRST_USUAL_DESCRIPTOR = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """The request that makes a launcher process run a job.

    Attributes:
        job: A plan, or a configuration that the launcher process plans first.
        environ: The environment of the job; None for the environment of the launcher process.
        folder: The job's private folder, which the program removes, or the launcher process if the
            program ends earlier; None for a job without such a folder.
        keeps_output: Whether the output of the instances is stored in the folder.
        listeners: The kinds of lines (log, warn, binding) that the launcher process sends as
            messages instead of printing them.
    """

    job: LaunchConfig | LaunchPlan
    # The environment's values may be secret, so the repr leaves them out.
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    folder: str | None = None
    keeps_output: bool = False
    listeners: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An attempt at running a job.

    Attributes:
        run_id: The name of the run.
        num_instances: The number of instances of the job.
        folder: The folder with the output of the instances; None if their output is not stored.
    """

    run_id: str
    num_instances: int
    folder: str | None


class Channel:
    """One end of the pair of sockets between a program and its launcher process."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a new channel."""
        one, other = socket.socketpair()
        return cls(_above_standard_streams(one)), cls(_above_standard_streams(other))

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Return the end of a channel whose descriptor this process has inherited."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the socket's descriptor; messages and the end of the channel make it readable."""
        return self._socket.fileno()

    def send(self, kind: str, value: object) -> None:
        """Send a message. If the other process has closed its end, the message is dropped."""
        data = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def receive(self) -> tuple[str, Any] | None:
        """Return the next message's kind and value; None if the channel's other end is closed."""
        data = self._read(int.from_bytes(self._read(_LENGTH_BYTES), "big"))
        return pickle.loads(data) if data else None

    def _read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the channel; empty if the other end is closed first."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while len(data) < size:
                part = self._socket.recv(size - len(data), socket.MSG_WAITALL)
                if not part:
                    return b""
                data += part
            return data
        return b""

    def signal_end(self, number: int) -> None:
        """Make the kernel signal this process when the channel's other end closes or sends data."""
        fcntl.fcntl(self._socket, fcntl.F_SETSIG, number)
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._socket, fcntl.F_GETFL)
        fcntl.fcntl(self._socket, fcntl.F_SETFL, flags | os.O_ASYNC)

    @property
    def is_closed(self) -> bool:
        """Whether the channel's other end is closed; valid only after receiving all messages."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def shut_down(self) -> None:
        """End the connection for both processes, and make a waiting ``receive`` return."""
        with contextlib.suppress(OSError):  # the other process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _above_standard_streams(end: socket.socket) -> socket.socket:
    """Return the socket with a descriptor above 2.

    In a daemon that has closed descriptors 0 to 2, a new socket gets one of these descriptors. The
    launcher process could not inherit such a socket, because it needs the descriptors 0 to 2 for
    its own standard streams.
    """
    with end:
        descriptor = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_USUAL_DESCRIPTOR)
    return socket.socket(fileno=descriptor)
