"""What moves arrays between the ranks of several hosts, without waiting: several requests at once.

A mesh connects each rank with each other one. All ranks start the same requests in the same order,
so messages need no headers. In an all-reduce, two ranks send each other whole arrays. With more
ranks, each reduces one segment of the array (reduce-scatter) and sends the result to the others
(all-gather). What carries the bytes is said by the two implementations, ``TcpMesh`` and
``MpiMesh``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.compression_rounds import Round, exact_round

__all__ = ["SUMS", "VALUES", "ConnectionLostError", "Mesh", "Request"]

# How values and sums interleave depends on timing. Each kind has a channel of its own, in which
# messages arrive in the order in which they were sent.
VALUES, SUMS = 0, 1
# New memory costs a fault for every page, so a few receive buffers are kept.
_MAX_FREE_BYTES = 64 * 1024 * 1024


class ConnectionLostError(Exception):
    """The other end has closed the connection, or its host answers no more.

    Attributes:
        rank: the rank at the other end.
        is_silent: whether the host at the other end answers nothing.
    """

    def __init__(self, rank: int, *, is_silent: bool = False) -> None:
        super().__init__(rank)
        self.rank = rank
        self.is_silent = is_silent


class Request:
    """An all-reduce, a round or an exchange that has started.

    Attributes:
        missing_values: ranks whose own values have not all arrived.
        missing_sums: ranks whose segments of the result have not all arrived.
        unsent: channel and rank of the arrays that have not all been sent.
    """

    __slots__ = ("_combine", "_waits_for_sends", "missing_sums", "missing_values", "unsent")

    def __init__(self, combine: Callable[[Request], None], *, waits_for_sends: bool) -> None:
        self.missing_values: set[int] = set()
        self.missing_sums: set[int] = set()
        self.unsent: set[tuple[int, int]] = set()
        self._combine: Callable[[Request], None] | None = combine
        # The sum overwrites values that must be sent first.
        self._waits_for_sends = waits_for_sends

    def combine(self) -> bool:
        """Combine the values once all of them have arrived; tell whether they are combined."""
        if self.missing_values or (self._waits_for_sends and self.unsent):
            return self._combine is None
        if self._combine is not None:
            combine, self._combine = self._combine, None
            combine(self)
        return True

    @property
    def is_done(self) -> bool:
        """Whether the array holds the result and may be changed."""
        return self._combine is None and not self.missing_sums and not self.unsent


class Mesh(ABC):
    """The requests of one rank.

    Args:
        rank: of this instance.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._others = [other for other in range(size) if other != rank]
        self._running: list[Request] = []
        self._free_buffers: dict[int, list[Array]] = {}
        self._free_bytes = 0

    # --- What carries the bytes ---------------------------------------------------------------

    @abstractmethod
    def _send(self, channel: int, rank: int, array: Array, request: Request) -> None:
        """Start to send a flat array, which is not empty; then take it from ``request.unsent``."""

    @abstractmethod
    def _receive(self, channel: int, rank: int, array: Array, missing: set[int]) -> None:
        """Start to fill a flat array, which is not empty; then take ``rank`` from ``missing``."""

    @abstractmethod
    def progress(self, seconds: float) -> bool:
        """Send and receive what is possible, after a wait of at most ``seconds``.

        Returns:
            Whether any bytes could be sent or received.

        Raises:
            ConnectionLostError: another rank has closed its connection, or its host is silent.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    # --- Requests -----------------------------------------------------------------------------

    def start_all_reduce(self, array: Array, function: np.ufunc) -> Request:
        """Start to reduce a flat array in place over all ranks, in their order.

        Nobody may touch the array before the all-reduce is done.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        return self.start_round(exact_round(array, function, self.rank, self.size))

    def start_round(self, one: Round) -> Request:
        """Start to exchange what a round says.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        own, results = one.outgoing[self.rank], one.results
        values_by_rank = {rank: self._take_buffer(own) for rank in self._others}
        values_by_rank[self.rank] = own

        def combine(request: Request) -> None:
            one.combine([values_by_rank[rank] for rank in range(self.size)])
            for rank in self._others:
                self._keep_buffer(values_by_rank[rank])
                if results:
                    self._start_send(SUMS, rank, results[self.rank], request)

        request = Request(combine, waits_for_sends=not results)
        for rank in self._others:
            self._start_receive(VALUES, rank, values_by_rank[rank], request.missing_values)
            if results:
                self._start_receive(SUMS, rank, results[rank], request.missing_sums)
        for rank in self._others:
            self._start_send(VALUES, rank, one.outgoing[rank], request)
        return self._started(request)

    def start_exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Request:
        """Start to send every other rank its array, and to receive one from each.

        Nobody may touch the arrays before the exchange is done.

        Args:
            outgoing: the flat array for each rank; that for this rank does not matter.
            incoming: by rank, the flat array to receive into, as large as what that rank sends.

        Raises:
            ConnectionLostError: another rank has closed its connection.
        """
        request = Request(lambda _: None, waits_for_sends=False)
        for rank in self._others:
            self._start_receive(VALUES, rank, incoming[rank], request.missing_values)
        for rank in self._others:
            self._start_send(VALUES, rank, outgoing[rank], request)
        return self._started(request)

    def _start_send(self, channel: int, rank: int, array: Array, request: Request) -> None:
        if array.size:
            request.unsent.add((channel, rank))
            self._send(channel, rank, array, request)

    def _start_receive(self, channel: int, rank: int, array: Array, missing: set[int]) -> None:
        if array.size:
            missing.add(rank)
            self._receive(channel, rank, array, missing)

    def _started(self, request: Request) -> Request:
        self._running.append(request)
        self._advance()
        return request

    def _advance(self) -> None:
        """Combine what has arrived, in the order of the requests: their sums are sent in it."""
        for request in self._running:
            if not request.combine():
                break
        self._running = [one for one in self._running if not one.is_done]

    def _take_buffer(self, like: Array) -> Array:
        """Return a buffer for the values of another rank."""
        free = self._free_buffers.get(like.nbytes)
        if not free:
            return np.empty_like(like)
        self._free_bytes -= like.nbytes
        return free.pop().view(like.dtype)

    def _keep_buffer(self, buffer: Array) -> None:
        """Keep a buffer for later requests of this size, unless enough are kept."""
        if self._free_bytes + buffer.nbytes > _MAX_FREE_BYTES:
            self._free_buffers.clear()  # they may be of sizes that are no longer asked for
            self._free_bytes = 0
        if buffer.nbytes <= _MAX_FREE_BYTES:
            self._free_buffers.setdefault(buffer.nbytes, []).append(buffer)
            self._free_bytes += buffer.nbytes
