"""All-reduce and exchange over TCP between hosts, without waiting: several run at once.

One instance of every host is a rank, connected to those of all other hosts. All ranks start the
same requests in the same order, so messages need no headers. In an all-reduce, two ranks send each
other whole arrays. With more ranks, each reduces one segment of the array (reduce-scatter) and
sends the result to the others (all-gather).

A connection is lost as well when the other end's host answers nothing, though it should: a program
that is late has a host that answers. Nothing here knows other time-outs, instances or the messages
of errors: those are ``socket_group.py``'s.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.rounds import Round, exact_round
from popdist_py.peers.silence import is_silent

__all__ = ["SILENT_SECONDS", "ConnectionLostError", "TcpMesh", "TcpRequest"]

# The launcher, which knows more, finds a host that is lost after 15 s.
SILENT_SECONDS = 20
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // 4),
)


class ConnectionLostError(Exception):
    """The other end has closed the connection, or its host answers no more.

    Attributes:
        rank: the rank at the other end.
        is_silent: whether nothing has come from its host for ``SILENT_SECONDS``.
    """

    def __init__(self, rank: int, *, is_silent: bool = False) -> None:
        super().__init__(rank)
        self.rank = rank
        self.is_silent = is_silent


class TcpRequest:
    """An all-reduce, a round or an exchange that has started.

    Attributes:
        missing_values: ranks whose own values have not all arrived.
        missing_sums: ranks whose segments of the result have not all arrived.
        unsent: number of segments that have not all been sent.
    """

    __slots__ = ("_combine", "_waits_for_sends", "missing_sums", "missing_values", "unsent")

    def __init__(self, combine: Callable[[TcpRequest], None], *, waits_for_sends: bool) -> None:
        self.missing_values: set[int] = set()
        self.missing_sums: set[int] = set()
        self.unsent = 0
        self._combine: Callable[[TcpRequest], None] | None = combine
        # The sum overwrites values that must be sent first.
        self._waits_for_sends = waits_for_sends

    def advance(self) -> None:
        """Reduce the values once all of them have arrived."""
        if self._combine is None or self.missing_values or (self._waits_for_sends and self.unsent):
            return
        combine, self._combine = self._combine, None
        combine(self)

    @property
    def is_done(self) -> bool:
        """Whether the array holds the result and may be changed."""
        return self._combine is None and not self.missing_sums and not self.unsent


class _Stream:
    """One connection: a queue of bytes to send, and a queue of buffers to receive into."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._outgoing: deque[tuple[memoryview, TcpRequest]] = deque()
        self._incoming: deque[tuple[memoryview, set[int]]] = deque()

    def send(self, array: Array, all_reduce: TcpRequest) -> None:
        """Queue the array to be sent, and send what the system takes now."""
        if array.size:
            all_reduce.unsent += 1
            self._outgoing.append((_bytes(array), all_reduce))
            self.send_queued()

    def receive(self, array: Array, missing_ranks: set[int]) -> None:
        """Queue the array to be received into; once full, discard the rank in ``missing_ranks``."""
        if array.size:
            missing_ranks.add(self.rank)
            self._incoming.append((_bytes(array), missing_ranks))

    @property
    def events(self) -> int:
        """The events that poll() waits for."""
        return (select.POLLOUT if self._outgoing else 0) | (select.POLLIN if self._incoming else 0)

    def send_queued(self) -> None:
        """Send as much as the system takes now."""
        while self._outgoing:
            view, all_reduce = self._outgoing[0]
            try:
                sent = self.connection.send(view)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from None
            if sent < len(view):
                self._outgoing[0] = (view[sent:], all_reduce)
            else:
                self._outgoing.popleft()
                all_reduce.unsent -= 1

    def receive_queued(self) -> None:
        """Receive as much as has arrived."""
        while self._incoming:
            view, missing_ranks = self._incoming[0]
            try:
                received = self.connection.recv_into(view)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from None
            if received == 0:
                raise ConnectionLostError(self.rank)
            if received < len(view):
                self._incoming[0] = (view[received:], missing_ranks)
            else:
                self._incoming.popleft()
                missing_ranks.discard(self.rank)

    def _lost(self, error: OSError) -> ConnectionLostError:
        return ConnectionLostError(self.rank, is_silent=error.errno == errno.ETIMEDOUT)

    def is_silent(self) -> bool:
        """Whether the other end's host answers nothing of what was sent to it."""
        return is_silent(self.connection, SILENT_SECONDS)


class TcpMesh:
    """Connections to all other ranks, two to each.

    Messages have no headers, and how values and sums interleave depends on timing: so each kind has
    a connection of its own.

    Args:
        rank: of this instance.
        values: by other rank, the connection for the values of one rank (reduce-scatter).
        sums: by other rank, the connection for segments of the result (all-gather).
    """

    def __init__(
        self, rank: int, values: Mapping[int, socket.socket], sums: Mapping[int, socket.socket]
    ) -> None:
        self.rank = rank
        self.size = len(values) + 1
        self._value_streams = {
            other: _Stream(other, connection) for other, connection in values.items()
        }
        self._sum_streams = {
            other: _Stream(other, connection) for other, connection in sums.items()
        }
        self._streams_by_descriptor = {
            stream.connection.fileno(): stream
            for stream in (*self._value_streams.values(), *self._sum_streams.values())
        }
        self._running: list[TcpRequest] = []
        self._free_buffers: dict[int, list[Array]] = {}
        for stream in self._streams_by_descriptor.values():
            stream.connection.setblocking(False)
            stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in _KEEP_ALIVE:
                stream.connection.setsockopt(*option)
        # A forked child would keep the connections open after this process has ended.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams_by_descriptor.values():
            stream.connection.close()

    # --- All-reduces ------------------------------------------------------------------------------

    def start_all_reduce(self, array: Array, function: np.ufunc) -> TcpRequest:
        """Start to reduce a flat array in place over all ranks, in their order.

        Nobody may touch the array before the all-reduce is done.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        return self.start_round(exact_round(array, function, self.rank, self.size))

    def start_round(self, one: Round) -> TcpRequest:
        """Start to exchange what a round says.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        own, results = one.outgoing[self.rank], one.results
        sum_streams = list(self._sum_streams.values()) if results else []
        values_by_rank = {rank: self._receive_buffer(own) for rank in self._value_streams}
        values_by_rank[self.rank] = own

        def combine(all_reduce: TcpRequest) -> None:
            one.combine([values_by_rank[rank] for rank in range(self.size)])
            self._free_buffers[own.nbytes] += [values_by_rank[rank] for rank in self._value_streams]
            for stream in sum_streams:
                stream.send(results[self.rank], all_reduce)

        all_reduce = TcpRequest(combine, waits_for_sends=not sum_streams)
        for rank, stream in self._value_streams.items():
            stream.receive(values_by_rank[rank], all_reduce.missing_values)
        for stream in sum_streams:
            stream.receive(results[stream.rank], all_reduce.missing_sums)
        for rank, stream in self._value_streams.items():
            stream.send(one.outgoing[rank], all_reduce)
        self._running.append(all_reduce)
        self._advance()
        return all_reduce

    def start_exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> TcpRequest:
        """Start to send every other rank its array, and to receive one from each.

        Nobody may touch the arrays before the exchange is done.

        Args:
            outgoing: the flat array for each rank; that for this rank does not matter.
            incoming: by rank, the flat array to receive into, as large as what that rank sends.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        request = TcpRequest(lambda _: None, waits_for_sends=False)
        for rank, stream in self._value_streams.items():
            stream.receive(incoming[rank], request.missing_values)
        for rank, stream in self._value_streams.items():
            stream.send(outgoing[rank], request)
        self._running.append(request)
        self._advance()
        return request

    def _receive_buffer(self, like: Array) -> Array:
        """Return a buffer for another rank's values; new memory costs a fault for every page."""
        free = self._free_buffers.setdefault(like.nbytes, [])
        return free.pop().view(like.dtype) if free else np.empty_like(like)

    def _advance(self) -> None:
        for all_reduce in self._running:
            all_reduce.advance()
        self._running = [one for one in self._running if not one.is_done]

    def progress(self, seconds: float) -> bool:
        """Send and receive what is possible, after a wait of at most ``seconds``.

        Returns:
            Whether any bytes could be sent or received.

        Raises:
            ConnectionLostError: another rank has closed its connection, or its host is silent.
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
