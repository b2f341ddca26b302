"""A mesh over TCP, with two connections to each other rank.

A connection counts as lost when it is closed, or when the host at the other end no longer answers.
A host counts as answering even if its program is slow, because its kernel answers. ``mesh_group``
handles time-outs and error messages.
"""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.between_hosts.mesh import (
    LENGTH_BYTES,
    SUMS,
    VALUES,
    ConnectionLostError,
    Mesh,
    Request,
    length_of,
)
from popdist_py.peers.silence import is_silence, is_silent, keep_alive

__all__ = ["TcpMesh"]


class _Stream:
    """One connection, with a queue of bytes to send and a queue of buffers to receive into."""

    def __init__(self, channel: int, rank: int, connection: socket.socket) -> None:
        self._channel = channel
        self.rank = rank
        self.connection = connection
        self._outgoing: deque[tuple[memoryview, Request]] = deque()
        self._incoming: deque[tuple[memoryview, Callable[[], None]]] = deque()

    def send(self, array: Array, request: Request) -> None:
        """Queue an array for sending, and send the bytes that the system accepts now."""
        self._outgoing.append((_bytes(array), request))
        self.send_queued()

    def receive(self, array: Array, missing_ranks: set[int]) -> None:
        """Queue an array, to be filled with received bytes.

        Once the array is full, this connection's rank is removed from ``missing_ranks``.
        """
        self._incoming.append((_bytes(array), lambda: missing_ranks.discard(self.rank)))

    def receive_message(self, memory: Array, missing_ranks: set[int]) -> None:
        """Start to receive a message. The first bytes of the message contain its length."""
        view = _bytes(memory)

        def receive_rest() -> None:
            rest = view[LENGTH_BYTES : length_of(memory)]
            self._incoming.appendleft((rest, lambda: missing_ranks.discard(self.rank)))

        self._incoming.append((view[:LENGTH_BYTES], receive_rest))

    @property
    def events(self) -> int:
        """The events for which poll() must wait on this connection."""
        return (select.POLLOUT if self._outgoing else 0) | (select.POLLIN if self._incoming else 0)

    def send_queued(self) -> None:
        """Send as many queued bytes as the system accepts without blocking."""
        while self._outgoing:
            view, request = self._outgoing[0]
            try:
                sent = self.connection.send(view)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from None
            if sent < len(view):
                self._outgoing[0] = (view[sent:], request)
            else:
                self._outgoing.popleft()
                request.unsent.discard((self._channel, self.rank))

    def receive_queued(self) -> None:
        """Receive the bytes that have arrived into the queued arrays."""
        while self._incoming:
            view, complete = self._incoming[0]
            try:
                received = self.connection.recv_into(view)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from None
            if received == 0:
                raise ConnectionLostError(self.rank)
            if received < len(view):
                self._incoming[0] = (view[received:], complete)
            else:
                self._incoming.popleft()
                complete()

    def _lost(self, error: OSError) -> ConnectionLostError:
        return ConnectionLostError(self.rank, is_silent=is_silence(error))

    def is_silent(self) -> bool:
        """Tell whether the host at the other end no longer answers."""
        return is_silent(self.connection)


class TcpMesh(Mesh):
    """The connections to all other ranks: two for each rank, one for values and one for sums.

    Args:
        rank: Rank of this instance.
        values: For each other rank, the connection that carries arrays before they are reduced.
        sums: For each other rank, the connection that carries segments of the reduced arrays.
    """

    def __init__(
        self, rank: int, values: Mapping[int, socket.socket], sums: Mapping[int, socket.socket]
    ) -> None:
        super().__init__(rank, len(values) + 1)
        self._streams = tuple(
            {other: _Stream(channel, other, connection) for other, connection in each.items()}
            for channel, each in ((VALUES, values), (SUMS, sums))
        )
        self._streams_by_descriptor = {
            stream.connection.fileno(): stream
            for streams in self._streams
            for stream in streams.values()
        }
        for stream in self._streams_by_descriptor.values():
            stream.connection.setblocking(False)
            stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(stream.connection)
        # A forked child closes its copies of the connections. Otherwise, the connections would stay
        # open after this process has ended.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))

    def leave(self) -> None:
        """Tell the other ranks that this rank has left, by shutting down the connections.

        The file descriptors stay open, because another thread may still use them.
        """
        for stream in self._streams_by_descriptor.values():
            with suppress(OSError):
                stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams_by_descriptor.values():
            stream.connection.close()

    def _send(self, channel: int, rank: int, array: Array, request: Request) -> None:
        self._streams[channel][rank].send(array, request)

    def _receive(self, channel: int, rank: int, array: Array, missing: set[int]) -> None:
        self._streams[channel][rank].receive(array, missing)

    def _receive_message(self, rank: int, memory: Array, missing: set[int]) -> None:
        self._streams[VALUES][rank].receive_message(memory, missing)

    def progress(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until bytes can be sent or received; then transfer them.

        Returns:
            Whether any bytes could be sent or received.

        Raises:
            ConnectionLostError: Another rank has closed its connection, or its host no longer
                answers.
        """
        poll = select.poll()
        for descriptor, stream in self._streams_by_descriptor.items():
            if stream.events:
                poll.register(descriptor, stream.events)
        ready = poll.poll(1000 * seconds)
        for descriptor, events in ready:
            stream = self._streams_by_descriptor[descriptor]
            if events & select.POLLOUT:
                stream.send_queued()
            if events & ~select.POLLOUT:
                stream.receive_queued()
        self._advance()
        if not ready:
            for stream in self._streams_by_descriptor.values():
                if stream.is_silent():
                    raise ConnectionLostError(stream.rank, is_silent=True)
        return bool(ready)


def _close(reference: weakref.ref[TcpMesh]) -> None:
    mesh = reference()
    if mesh is not None:
        mesh.close()


def _bytes(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]
