"""A channel, which sends and receives headers and bytes of messages over one connection.

The rank that opened the connection sends messages over it, and the rank at the other end sends
answers. All headers have the same size. A header states the number of bytes that follow it.
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
from popdist_py.peers.silence import is_silence, is_silent

__all__ = ["INLINE_BYTES", "Channel", "Header", "Kind", "Receiver"]

# If a message has at most this number of bytes, the sender sends the bytes right after the header,
# because the kernel can buffer them.
INLINE_BYTES = 64 * 1024
_CHUNK_BYTES = 2 * (64 + INLINE_BYTES)
_FORMAT = struct.Struct("<B7xqQQQQ16s")


class Kind(IntEnum):
    """The kinds of headers."""

    # The sender of a message sends these kinds to its receiver.
    INLINE = 1  # the bytes of the message follow this header
    ANNOUNCED = 2  # the bytes of the message are in the sender's memory at ``address``
    DATA = 3  # the requested bytes follow this header
    # The receiver of a message sends these kinds to its sender.
    REQUEST = 4  # the sender must send the bytes of an announced message
    DONE = 5  # the receiver has read the bytes of an announced message
    MISMATCH = 6  # the receive differs from the message in dtype or number of elements
    CONSUMED = 7  # the receiver has consumed ``size`` more bytes of inline messages
    # The sender and the receiver of a message may send this kind.
    LEAVING = 8  # the rank leaves the group normally


class Header(NamedTuple):  # a dataclass object would take several times as long to create
    """The header of a message, or of an answer to a message.

    Attributes:
        kind: One of the values of ``Kind``.
        tag: The tag of the message.
        number: The number that the sender gave to the message. Answers to the message contain the
            same number.
        elements: The number of elements of the tensor.
        size: The size of the tensor in bytes.
        address: The address of the bytes in the sender's memory.
        dtype: The name of the tensor's dtype.
    """

    kind: int
    tag: int = 0
    number: int = 0
    elements: int = 0
    size: int = 0
    address: int = 0
    dtype: bytes = b""

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _FORMAT.pack(*self)


class Receiver(Protocol):
    """The object that handles the data arriving over a channel."""

    def on_header(self, channel: Channel, header: Header, data: memoryview) -> None:
        """Handle a header that has arrived.

        ``data`` holds the bytes of an inline message, and is valid only during this call.
        """

    def room_for(self, channel: Channel, header: Header) -> memoryview:
        """Return the buffer for the bytes of a message that this rank has requested."""

    def on_filled(self, channel: Channel, header: Header) -> None:
        """Handle a message whose bytes have filled the buffer from ``room_for``."""


class Channel:
    """One connection to another rank, which may not be open yet.

    Args:
        rank: The rank at the other end.
        receiver: The object that handles the data arriving over this channel.

    Attributes:
        unconsumed: The number of inline bytes that this rank has sent, less the number that the
            other rank has reported as consumed.
        consumed: The number of inline bytes that receives of this rank have consumed since this
            rank's last report to the other rank.
        peer_pid: The process id of the other rank if its memory can be read, otherwise 0.
        events: The epoll events for which the connection is registered.
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
        """Use ``connection`` for this channel; send the greeting and then the queued data.

        Raises:
            ConnectionLostError: The other end has closed the connection.
        """
        self.connection = connection
        if greeting:
            self._outgoing.appendleft((memoryview(greeting), None))
        self.send_queued()

    def close(self) -> None:
        """Close the connection, and drop the queued data."""
        self._outgoing.clear()
        if self.connection is not None:
            self.connection.close()

    @property
    def is_sending(self) -> bool:
        """Whether some data waits in the queue to be sent."""
        return bool(self._outgoing)

    @property
    def has_ended(self) -> bool:
        """Whether the connection was closed by either side, or was never opened."""
        if self.connection is None or self.connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def check_silence(self) -> None:
        """Raise an error if the other rank is on another host that does not answer.

        Raises:
            ConnectionLostError: The other host does not answer.
        """
        connection = self.connection
        if connection is None or connection.family == socket.AF_UNIX:
            return
        if is_silent(connection):
            raise ConnectionLostError(self.rank, is_silent=True)

    # --- Sending ------------------------------------------------------------------------------

    def send(
        self,
        header: Header,
        data: memoryview | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a header and bytes; queue the part that the kernel does not accept yet.

        Args:
            header: The header to send.
            data: The bytes that follow the header. These bytes must not change before ``on_sent``
                is called.
            on_sent: A function to call when the kernel has accepted all bytes.

        Raises:
            ConnectionLostError: The other end has closed the connection.
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
        """Send as much of the queued data as the kernel accepts now.

        Raises:
            ConnectionLostError: The other end has closed the connection.
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
        except OSError as error:
            raise ConnectionLostError(self.rank, is_silent=is_silence(error)) from None

    # --- Receiving ----------------------------------------------------------------------------

    def receive(self) -> bool:
        """Receive and handle the data that has arrived; return whether any data has arrived.

        Raises:
            ConnectionLostError: The other end closed the connection or sent invalid data.
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
        except OSError as error:
            raise ConnectionLostError(self.rank, is_silent=is_silence(error)) from None
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
        """Record that ``count`` more bytes of the current buffer are filled."""
        assert self._room is not None
        self._room = self._room[count:]
        if not self._room:
            self._room = None
            self._receiver.on_filled(self, self._filling)
