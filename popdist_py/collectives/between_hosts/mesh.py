"""The mesh, which exchanges arrays between the ranks of several hosts without blocking.

A mesh connects each rank with each other rank, and can run several requests at once. All ranks
start the same requests in the same order, so messages need no headers. In an all-reduce between two
ranks, or of a small array, the ranks send one another whole arrays. In an all-reduce of a large
array between more ranks, each rank reduces one segment of the array (reduce-scatter) and sends the
result to the other ranks (all-gather). The subclasses ``TcpMesh`` and ``MpiMesh`` transfer the
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.compression_rounds import Round, exact_round

__all__ = ["LENGTH_BYTES", "SUMS", "VALUES", "ConnectionLostError", "Mesh", "Request", "length_of"]

# A mesh has two channels: VALUES carries the inputs of the ranks, and SUMS carries reduced
# segments. Only messages of the same channel keep their order, because inputs and reduced segments
# interleave differently from run to run.
VALUES, SUMS = 0, 1
# The length of a message is stored in this number of bytes at its start.
LENGTH_BYTES = 8
# The mesh keeps receive buffers of up to this number of bytes in total and reuses them, because new
# memory costs a page fault for every page.
_MAX_FREE_BYTES = 64 * 1024 * 1024


class ConnectionLostError(Exception):
    """Another rank has closed its connection to this rank, or its host no longer answers.

    Attributes:
        rank: The rank at the other end.
        is_silent: Whether the host at the other end does not answer.
    """

    def __init__(self, rank: int, *, is_silent: bool = False) -> None:
        super().__init__(rank)
        self.rank = rank
        self.is_silent = is_silent


class Request:
    """A data exchange between all ranks that has been started.

    Attributes:
        missing_values: The ranks whose values have not arrived yet.
        missing_sums: The ranks whose reduced segments have not arrived yet.
        unsent: The channel and the receiving rank of each array that is not completely sent yet.
    """

    __slots__ = ("_combine", "_waits_for_sends", "missing_sums", "missing_values", "unsent")

    def __init__(self, combine: Callable[[Request], None], *, waits_for_sends: bool) -> None:
        self.missing_values: set[int] = set()
        self.missing_sums: set[int] = set()
        self.unsent: set[tuple[int, int]] = set()
        self._combine: Callable[[Request], None] | None = combine
        # Whether ``combine`` must wait until all values are sent, because the result overwrites
        # these values.
        self._waits_for_sends = waits_for_sends

    def combine(self) -> bool:
        """Combine the ranks' values if all have arrived; return whether they are combined."""
        if self.missing_values or (self._waits_for_sends and self.unsent):
            return self._combine is None
        if self._combine is not None:
            combine, self._combine = self._combine, None
            combine(self)
        return True

    @property
    def is_done(self) -> bool:
        """Whether the request is complete, so that its arrays may be read and changed."""
        return self._combine is None and not self.missing_sums and not self.unsent


class Mesh(ABC):
    """The connections of one rank to all other ranks, and the requests that use them.

    Args:
        rank: Rank of this instance.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._others = [other for other in range(size) if other != rank]
        self._running: list[Request] = []
        self._free_buffers: dict[int, list[Array]] = {}
        self._free_bytes = 0

    # --- Sending and receiving ----------------------------------------------------------------

    @abstractmethod
    def _send(self, channel: int, rank: int, array: Array, request: Request) -> None:
        """Start to send a flat array that is not empty.

        Once the array is sent, the mesh removes the channel and rank from ``request.unsent``.
        """

    @abstractmethod
    def _receive(self, channel: int, rank: int, array: Array, missing: set[int]) -> None:
        """Start to receive into a flat array that is not empty.

        Once the array is full, the mesh removes ``rank`` from ``missing``.
        """

    @abstractmethod
    def _receive_message(self, rank: int, memory: Array, missing: set[int]) -> None:
        """Start to receive a message that another rank sends by ``start_messages``.

        The message is stored at the start of ``memory``. Once the message has arrived, the mesh
        removes ``rank`` from ``missing``.
        """

    @abstractmethod
    def progress(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until bytes can be sent or received; then transfer them.

        Returns:
            Whether any bytes could be sent or received.

        Raises:
            ConnectionLostError: Another rank has closed its connection, or its host no longer
                answers.
        """

    @abstractmethod
    def leave(self) -> None:
        """Tell the other ranks that this rank has left.

        Another thread may be in ``progress`` during this call.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    # --- Requests -----------------------------------------------------------------------------

    def start_all_reduce(self, array: Array, function: np.ufunc) -> Request:
        """Start to reduce a flat array in place over all ranks, in order of rank.

        The caller must not read or change the array before the all-reduce is done.

        Raises:
            ConnectionLostError: Another rank has closed its connection.
        """
        return self.start_round(exact_round(array, function, self.rank, self.size))

    def start_round(self, one: Round) -> Request:
        """Start the exchange of arrays that the Round ``one`` describes.

        Raises:
            ConnectionLostError: Another rank has closed its connection.
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
        """Start to send one array to every other rank, and to receive one array from each of them.

        The caller must not read or change the arrays before the exchange is done.

        Args:
            outgoing: The flat array to send to each rank. The array at the index of this rank is
                not sent.
            incoming: For each rank, the flat array to receive into. Each of these arrays has the
                size of the array that the rank sends.

        Raises:
            ConnectionLostError: Another rank has closed its connection.
        """
        request = Request(_combine_nothing, waits_for_sends=False)
        for rank in self._others:
            self._start_receive(VALUES, rank, incoming[rank], request.missing_values)
        for rank in self._others:
            self._start_send(VALUES, rank, outgoing[rank], request)
        return self._started(request)

    def start_messages(self, messages: Sequence[Array]) -> Request:
        """Start to send this rank's message to every other rank, and to receive their messages.

        The lengths of the messages may differ. The caller must not read or change the messages
        before the exchange is done.

        Args:
            messages: For this rank, its message; for each other rank, memory for the longest
                possible message. The first 8 bytes of a message are its length in bytes, as an
                integer.

        Raises:
            ConnectionLostError: Another rank has closed its connection.
        """
        request = Request(_combine_nothing, waits_for_sends=False)
        own = messages[self.rank]
        own = own[: length_of(own)]
        for rank in self._others:
            request.missing_values.add(rank)
            self._receive_message(rank, messages[rank], request.missing_values)
        for rank in self._others:
            self._start_send(VALUES, rank, own, request)
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
        """Combine the values of requests in the order of their start, to send sums in order."""
        for request in self._running:
            if not request.combine():
                break
        self._running = [one for one in self._running if not one.is_done]

    def _take_buffer(self, like: Array) -> Array:
        """Return a buffer with the size of ``like``, to receive the values of another rank."""
        free = self._free_buffers.get(like.nbytes)
        if not free:
            return np.empty_like(like)
        self._free_bytes -= like.nbytes
        return free.pop().view(like.dtype)

    def _keep_buffer(self, buffer: Array) -> None:
        """Keep a receive buffer for reuse; free all kept buffers before they get too large."""
        if self._free_bytes + buffer.nbytes > _MAX_FREE_BYTES:
            self._free_buffers.clear()  # buffers of some sizes may not be needed again
            self._free_bytes = 0
        if buffer.nbytes <= _MAX_FREE_BYTES:
            self._free_buffers.setdefault(buffer.nbytes, []).append(buffer)
            self._free_bytes += buffer.nbytes


def length_of(message: Array) -> int:
    """Return the length of a message in bytes, which is stored in its first bytes."""
    return int(message[:LENGTH_BYTES].view(np.int64)[0])


def _combine_nothing(_: Request) -> None:
    """Do nothing with the received values."""
