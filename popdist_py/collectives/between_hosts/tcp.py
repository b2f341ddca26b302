"""TCP between hosts: arrays are reduced piece by piece while they travel.

Every host has one instance at such a wire, connected to those of all other hosts. All of them begin
the same pieces in the same order, so what travels needs no headers. Two hosts send each other whole
pieces; of more, each adds up one segment of a piece and sends its sum to the others.

Knows bytes and sums only: what is said when a wait ends badly is ``link.py``'s.
"""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from popdist_py.collectives.arithmetic import Array

__all__ = ["Piece", "Wire", "WireLostError"]

# Up to here everybody is sent everything: a second trip would cost more than the bytes it saves.
_WHOLE_BYTES = 32 * 1024


class WireLostError(Exception):
    """The other end of a connection has gone.

    Attributes:
        rank: whose.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Piece:
    """An array on its way.

    Attributes:
        owing: ranks whose own values have not all come.
        summing: ranks whose sums have not all come.
        unsent: number of parts that have not left.
    """

    __slots__ = ("_combine", "_needs_room", "owing", "summing", "unsent")

    def __init__(self, combine: Callable[[Piece], None], *, needs_room: bool) -> None:
        self.owing: set[int] = set()
        self.summing: set[int] = set()
        self.unsent = 0
        self._combine: Callable[[Piece], None] | None = combine
        # The sum takes the place of values that first have to leave.
        self._needs_room = needs_room

    def advance(self) -> None:
        """Add up what has come, once everything has."""
        if self._combine is None or self.owing or (self._needs_room and self.unsent):
            return
        combine, self._combine = self._combine, None
        combine(self)

    @property
    def is_done(self) -> bool:
        """Whether the array holds the result and may be changed."""
        return self._combine is None and not self.summing and not self.unsent


class _Stream:
    """One connection: bytes that have to leave, and room for those that have to come."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self._leaving: deque[tuple[memoryview, Piece]] = deque()
        self._coming: deque[tuple[memoryview, set[int]]] = deque()

    def send(self, array: Array, piece: Piece) -> None:
        """Let the array leave after everything before it."""
        if array.size:
            piece.unsent += 1
            self._leaving.append((_bytes(array), piece))
            self.push()

    def expect(self, array: Array, waiting: set[int]) -> None:
        """Fill the array with what comes next, and take this rank out of ``waiting`` then."""
        if array.size:
            waiting.add(self.rank)
            self._coming.append((_bytes(array), waiting))

    @property
    def events(self) -> int:
        """What poll() has to look for."""
        return (select.POLLOUT if self._leaving else 0) | (select.POLLIN if self._coming else 0)

    def push(self) -> None:
        """Let go of what the system takes now."""
        while self._leaving:
            view, piece = self._leaving[0]
            try:
                sent = self.connection.send(view)
            except BlockingIOError:
                return
            except OSError:
                raise WireLostError(self.rank) from None
            if sent < len(view):
                self._leaving[0] = (view[sent:], piece)
            else:
                self._leaving.popleft()
                piece.unsent -= 1

    def pull(self) -> None:
        """Take what is there now."""
        while self._coming:
            view, waiting = self._coming[0]
            try:
                got = self.connection.recv_into(view)
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if got == 0:
                raise WireLostError(self.rank)
            if got < len(view):
                self._coming[0] = (view[got:], waiting)
            else:
                self._coming.popleft()
                waiting.discard(self.rank)


class Wire:
    """Connections to all other ranks.

    Args:
        rank: of this instance.
        values: for each other rank, the connection that carries values of one rank.
        sums: for each other rank, the connection that carries sums.
    """

    def __init__(
        self, rank: int, values: Mapping[int, socket.socket], sums: Mapping[int, socket.socket]
    ) -> None:
        self.rank = rank
        self.size = len(values) + 1
        self._values = {other: _Stream(other, connection) for other, connection in values.items()}
        self._sums = {other: _Stream(other, connection) for other, connection in sums.items()}
        self._streams = {
            stream.connection.fileno(): stream
            for stream in (*self._values.values(), *self._sums.values())
        }
        self._pieces: list[Piece] = []
        self._pool: dict[int, list[Array]] = {}
        for stream in self._streams.values():
            stream.connection.setblocking(False)
            stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A copy in a child would keep the connections open after this process has ended.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(this))

    def close(self) -> None:
        """Close the connections."""
        for stream in self._streams.values():
            stream.connection.close()

    # --- Pieces -----------------------------------------------------------------------------------

    def start(self, array: Array, function: np.ufunc) -> Piece:
        """Begin to reduce a flat array in place over all ranks, in their order.

        Until the piece is done nobody may touch the array.

        Raises:
            WireLostError: another rank has gone.
        """
        if self.size == 2 or array.nbytes * (self.size - 2) <= _WHOLE_BYTES:
            segments, targets = [array] * self.size, []
        else:
            bounds = [array.size * rank // self.size for rank in range(self.size + 1)]
            segments = [array[a:b] for a, b in pairwise(bounds)]
            targets = list(self._sums.values())
        own = segments[self.rank]
        parts = {rank: self._room(own) for rank in self._values}
        parts[self.rank] = own

        def combine(piece: Piece) -> None:
            _reduce([parts[rank] for rank in range(self.size)], function, own)
            self._pool[own.nbytes] += [parts[rank] for rank in self._values]
            for stream in targets:
                stream.send(own, piece)

        piece = Piece(combine, needs_room=not targets)
        for rank, stream in self._values.items():
            stream.expect(parts[rank], piece.owing)
        for stream in targets:
            stream.expect(segments[stream.rank], piece.summing)
        for rank, stream in self._values.items():
            stream.send(segments[rank], piece)
        self._pieces.append(piece)
        self._advance()
        return piece

    def _room(self, like: Array) -> Array:
        """Return memory for another rank's values; fresh memory costs a fault for every page."""
        pool = self._pool.setdefault(like.nbytes, [])
        return pool.pop().view(like.dtype) if pool else np.empty_like(like)

    def _advance(self) -> None:
        for piece in self._pieces:
            piece.advance()
        self._pieces = [piece for piece in self._pieces if not piece.is_done]

    def progress(self, seconds: float) -> bool:
        """Move what can be moved; wait at most ``seconds`` for it. Return whether anything did.

        Raises:
            WireLostError: another rank has gone.
        """
        poll = select.poll()
        for number, stream in self._streams.items():
            if stream.events:
                poll.register(number, stream.events)
        ready = poll.poll(1000 * seconds)
        for number, events in ready:
            stream = self._streams[number]
            if events & select.POLLOUT:
                stream.push()
            if events & ~select.POLLOUT:
                stream.pull()
        self._advance()
        return bool(ready)


def _close(reference: weakref.ref[Wire]) -> None:
    wire = reference()
    if wire is not None:
        wire.close()


def _bytes(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


def _reduce(parts: Sequence[Array], function: np.ufunc, out: Array) -> None:
    """Reduce ``parts``, one of which is ``out``, in their order into ``out``."""
    # Into the first two nothing else is put before they are used.
    total = out if out is parts[0] or out is parts[1] else parts[0]
    function(parts[0], parts[1], out=total)
    for part in parts[2:]:
        function(total, part, out=total)
    if total is not out:
        np.copyto(out, total)
