"""A connection that exchanges frames without blocking the launcher, and the wrapper behind it."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from poprun_py.instance import control_protocol

_CHUNK = 1 << 18
# If the process at the other end of a connection reads nothing for this long, the last frames for
# that process are dropped.
_READER_SECONDS = 5.0
# At the end of the job, the launcher waits at most this long for a process to read its last frames.
_LAST_READ_SECONDS = 1.0

Handler = Callable[["Connection", int], None]


class Connection:
    """A connection that exchanges frames and never waits for the process at its other end.

    Args:
        channel: The socket.
        selector: The selector that tells when the socket can be read or written.
        handler: The function to call with this connection and the events of the selector.
    """

    def __init__(
        self, channel: socket.socket, selector: selectors.BaseSelector, handler: Handler
    ) -> None:
        channel.setblocking(False)
        self.channel = channel
        self.is_open = True
        self.has_parts = False  # whether frames of ``send_parts`` are still to be sent
        self._selector = selector
        self._reader = control_protocol.Reader()
        self._unsent = bytearray()
        self._parts: Iterator[bytes] = iter(())
        self._is_last = False  # whether to close the connection after the unsent bytes
        self._sent_at = 0.0
        self.watch(handler)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.channel.fileno()

    def watch(self, handler: Handler, *, is_read: bool = True) -> None:
        """Set the handler of events, and whether to read frames from the connection."""
        self._handler, self._is_read = handler, is_read
        self._update()

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Return the kind and payload of each complete frame; None if the connection has ended."""
        try:
            data = self.channel.recv(_CHUNK)
            frames = self._reader.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            return None
        return frames if data else None

    def send(self, frame: bytes) -> None:
        """Send a frame as soon as the socket accepts its bytes."""
        self._unsent += frame
        self.flush()

    def send_parts(self, frames: Iterator[bytes]) -> None:
        """Send the frames of an iterator; take each frame only after the previous one was sent.

        Frames of ``send`` may be sent between these frames.
        """
        self._parts, self.has_parts = frames, True
        self.flush()

    def send_last(self, frames: bytes) -> None:
        """Send frames, and close the connection after the frames are sent."""
        self._is_last, self._sent_at = True, time.monotonic()
        self.send(frames)

    def flush(self) -> None:
        """Send as many unsent bytes as the socket accepts without blocking."""
        try:
            if self.has_parts and not self._unsent:
                # Only one part is added at a time, so that frames of ``send`` can be sent between
                # the parts.
                self._unsent += (part := next(self._parts, b""))
                self.has_parts = bool(part)
            while self._unsent and self.is_open:
                del self._unsent[: self.channel.send(self._unsent)]
                self._sent_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
            self.has_parts = False
        if self._is_last and not self._unsent:
            self.close()
        self._update()

    def drop_unread(self, now: float) -> None:
        """Close the connection if its last frames have not been read for some seconds."""
        if self._is_last and now > self._sent_at + _READER_SECONDS:
            self.close()

    def finish(self) -> None:
        """Send the rest of the last frames within one second, and close the connection."""
        with contextlib.suppress(OSError):
            if self._is_last:
                self.channel.settimeout(_LAST_READ_SECONDS)
                self.channel.sendall(self._unsent)
        self.close()

    def close(self) -> None:
        """Close the connection without sending the unsent bytes."""
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(KeyError):
                self._selector.unregister(self)
            self.channel.close()

    def _update(self) -> None:
        """Tell the selector whether to watch the socket for reading, and for writing."""
        if not self.is_open:
            return
        wanted = selectors.EVENT_READ if self._is_read else 0
        wanted |= selectors.EVENT_WRITE if self._unsent or self.has_parts else 0
        registered = self._selector.get_map().get(self)
        if registered is None:
            if wanted:
                self._selector.register(self, wanted, self._handler)
        elif not wanted:
            self._selector.unregister(self)
        elif (registered.events, registered.data) != (wanted, self._handler):
            self._selector.modify(self, wanted, self._handler)


@dataclass(slots=True)
class Peer:
    """The launcher's state of one instance.

    Attributes:
        host: The name of the instance's host, as the host itself reports its name.
        pid: The process id of the instance's wrapper.
        port: The free port that the instance's host offers to the programs as ``MASTER_PORT``.
        meeting_port: Another free port, at which instance 0 accepts the other instances if the
            job does not start MPI; 0 in a job with one host.
        clock_offset_ns: The nanoseconds to add to the clock of the instance's host to get the time
            of the launcher's host.
        started: The wrapper's report that the program has started; empty before the report arrives.
        program_end: The wrapper's report of how the program ended; None before the report arrives.
        instance_end: The report that the wrapper sends after all processes of the program have
            ended and all output has arrived; None before the report arrives.
        started_mpi: Whether the program has started MPI itself, and needs mpirun until its end.
        lost_at: The time when the wrapper's end of the connection was closed; 0 before, and if the
            launcher has closed the connection, for example to a silent host.
        has_model: Whether the last report about the running program had a PopTorch model.
        leased: The CPUs that the wrapper has leased on its host for all instances there.
        is_for_next: Whether the wrapper waits for the next attempt. Its index is then not an index
            of an instance.
        tail: The last bytes of the instance's standard error.
    """

    index: int
    connection: Connection
    host: str
    pid: int
    port: int = 0
    meeting_port: int = 0
    clock_offset_ns: int = 0
    started: dict[str, Any] = field(default_factory=dict)
    program_end: dict[str, Any] | None = None
    instance_end: dict[str, Any] | None = None
    started_mpi: bool = False
    lost_at: float = 0.0
    has_model: bool = False
    leased: Sequence[int] = ()
    is_for_next: bool = False
    tail: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The content of the first frame of a wrapper.

    Attributes:
        rank: The index of the wrapper's instance.
        token: The secret of the control channel. Only a frame on a Unix socket has a token.
        port: A free port on the wrapper's host for the programs; 0 if the frame has no port.
        meeting_port: Another free port; 0 if the frame has none.
        time_ns: The time on the clock of the wrapper's host; 0 if the frame has no time.
        again: Whether the wrapper replaces a wrapper of the same instance that was killed.
    """

    rank: int
    pid: int
    host: str
    token: str = ""
    port: int = 0
    meeting_port: int = 0
    time_ns: int = 0
    again: bool = False


def parse_hello(kind: bytes, payload: bytes) -> Hello:
    """Return the content of a wrapper's first frame.

    Raises:
        ValueError: The frame is not a valid first frame of a wrapper.
    """
    try:
        value = json.loads(payload)
    except RecursionError:
        raise ValueError("the JSON value nests too deeply") from None
    numbers = ("rank", "pid", "port", "meeting_port", "time_ns")
    types = {"host": str, "token": str, "again": bool, **dict.fromkeys(numbers, int)}
    if (
        kind != control_protocol.HELLO
        or not isinstance(value, dict)
        or not {"rank", "pid", "host"} <= value.keys()
        or any(type(each) is not types.get(name) for name, each in value.items())
    ):
        raise ValueError("the received data is not the first frame of an instance wrapper")
    return Hello(**value)
