"""A channel: the headers and bytes of messages over one connection between two ranks.

The rank that connected sends messages over it; the other one sends answers back. Every header has
one size; the bytes that follow it have the length that it says.

Nothing here knows what matches what, waits, or opens a connection.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

from popdist_py.collectives.between_hosts.mesh import ConnectionLostError

__all__ = ["INLINE_BYTES", "Channel", "Header", "Kind", "Receiver"]

# A message of at most so many bytes follows its header at once; the system takes that much.
INLINE_BYTES = 64 * 1024
_CHUNK_BYTES = 2 * (64 + INLINE_BYTES)
_FORMAT = struct.Struct("<B7xqQQQQ16s")


class Kind(IntEnum):
    """What a header says."""

    # From the sender of a message to its receiver.
    INLINE = 1  # the bytes follow
    ANNOUNCED = 2  # the bytes wait at ``address``
    DATA = 3  # the bytes that were asked for follow
    # From the receiver to the sender.
    REQUEST = 4  # send the bytes of an announced message
    DONE = 5  # the bytes of an announced message were read
    MISMATCH = 6  # another number or dtype is received
    CONSUMED = 7  # so many inline bytes have found a receive
    # Both ways.
    LEAVING = 8  # the group is left in order


class Header(NamedTuple):  # made for every message: a dataclass takes several times as long
    """What precedes the bytes of a message, or answers one.

    Attributes:
        kind: what it says.
        tag: of the message.
        number: of an announced message, given by its sender.
        elements: of the tensor.
        size: bytes of the tensor.
        address: of the bytes in the sender's memory.
        dtype: name of the tensor's.
    """

    kind: int
    tag: int = 0
    number: int = 0
    elements: int = 0
    size: int = 0
    address: int = 0
    dtype: bytes = b""

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        return _FORMAT.pack(*self)


class Receiver(Protocol):
    """Who takes what arrives over a channel."""

    def on_header(self, channel: Channel, header: Header, data: memoryview) -> None:
        """Take a header, and the bytes of an inline message; they are gone afterwards."""

    def room_for(self, channel: Channel, header: Header) -> memoryview:
        """Return where the bytes go that were asked for."""

    def on_filled(self, channel: Channel, header: Header) -> None:
        """Take note that all of them have arrived."""


class Channel:
    """One connection, or one that is still to be made.

    Args:
        rank: at the other end.
        receiver: who takes what arrives.

    Attributes:
        unconsumed: inline bytes that were sent and have not found a receive.
        consumed: inline bytes that were received, and have found one since the last answer.
        peer_pid: process at the other end if its memory can be read, else 0.
        events: those that the connection was last watched for.
    """

    def __init__(self, rank: int, receiver: Receiver) -> None:
        self.rank = rank
        self.connection: socket.socket | None = None
        self.unconsumed = self.consumed = self.peer_pid = self.events = 0
        self._receiver = receiver
        self._outgoing: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._rest = b""
        self._room: memoryview | None = None
        self._filling = Header(0)

    def open(self, connection: socket.socket, greeting: bytes = b"") -> None:
        """Use a connection; what was sent before follows the greeting.

        Raises:
            ConnectionLostError: the other end has closed the connection.
        """
        self.connection = connection
        if greeting:
            self._outgoing.appendleft((memoryview(greeting), None))
        self.send_queued()

    def close(self) -> None:
        """Close the connection, and forget what was not sent."""
        self._outgoing.clear()
        if self.connection is not None:
            self.connection.close()

    @property
    def is_sending(self) -> bool:
        """Whether the system has not taken all that was sent."""
        return bool(self._outgoing)

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed the connection, or this one has."""
        if self.connection is None or self.connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    # --- Sending ------------------------------------------------------------------------------

    def send(
        self,
        header: Header,
        data: memoryview | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a header and bytes, now or once the system takes them.

        Args:
            header: what to send.
            data: bytes that follow; nobody may change them before ``on_sent``.
            on_sent: called when the system has taken everything.

        Raises:
            ConnectionLostError: the other end has closed the connection.
        """
        views = [memoryview(header.pack())]
        if data is not None and data.nbytes:
            views.append(data)
        if self.connection is not None and not self._outgoing:
            sent = self._send_some(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if views:
                views[0] = views[0][sent:]
            elif on_sent is not None:
                on_sent()
        for index, view in enumerate(views):
            self._outgoing.append((view, on_sent if index == len(views) - 1 else None))

    def send_queued(self) -> None:
        """Send what the system takes now.

        Raises:
            ConnectionLostError: the other end has closed the connection.
        """
        while self._outgoing:
            view, on_sent = self._outgoing[0]
            sent = self._send_some([view])
            if sent < view.nbytes:
                self._outgoing[0] = view[sent:], on_sent
                return
            self._outgoing.popleft()
            if on_sent is not None:
                on_sent()

    def _send_some(self, views: list[memoryview]) -> int:
        assert self.connection is not None
        try:
            return self.connection.sendmsg(views)
        except BlockingIOError:
            return 0
        except OSError:
            raise ConnectionLostError(self.rank) from None

    # --- Receiving ----------------------------------------------------------------------------

    def receive(self) -> bool:
        """Take what has arrived; tell whether there was something.

        Raises:
            ConnectionLostError: the other end has closed the connection, or sends nonsense.
        """
        assert self.connection is not None
        try:
            if self._room is not None:
                count = self.connection.recv_into(self._room)
                self._fill(count)
            else:
                data = self.connection.recv(_CHUNK_BYTES)
                count = len(data)
                self._take(self._rest + data if self._rest else data)
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            raise ConnectionLostError(self.rank)
        return True

    def _take(self, data: bytes) -> None:
        view, start = memoryview(data), 0
        while len(view) - start >= _FORMAT.size:
            header = Header(*_FORMAT.unpack_from(view, start))
            after = start + _FORMAT.size
            if header.kind == Kind.DATA:
                self._room, self._filling = self._receiver.room_for(self, header), header
                taken = min(len(self._room), len(view) - after)
                self._room[:taken] = view[after : after + taken]
                self._fill(taken)
                start = after + taken
                continue
            size = header.size if header.kind == Kind.INLINE else 0
            if size > INLINE_BYTES:
                raise ConnectionLostError(self.rank)
            if len(view) - after < size:
                break
            start = after + size
            self._receiver.on_header(self, header, view[after:start])
        self._rest = bytes(view[start:])

    def _fill(self, count: int) -> None:
        """Take note that the first ``count`` bytes of the room are filled."""
        assert self._room is not None
        self._room = self._room[count:]
        if not self._room:
            self._room = None
            self._receiver.on_filled(self, self._filling)
