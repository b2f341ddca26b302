"""Collective calls with a time limit, over a mesh that connects one instance of each host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from popdist_py import activities
from popdist_py.collectives.arithmetic import FUNCTIONS, Array
from popdist_py.collectives.between_hosts.mesh import (
    LENGTH_BYTES,
    ConnectionLostError,
    Mesh,
    Request,
)
from popdist_py.collectives.compression_rounds import Round, reduce_in_order
from popdist_py.collectives.tree import Node
from popdist_py.collectives.waiting import Span, WaitLimits, WaitTime
from popdist_py.errors import InstanceLostError

__all__ = ["MeshGroup", "Started", "max_compared_bytes"]

# The longest time, in seconds, to wait for the mesh before the time limit is checked again.
_POLL_SECONDS = 0.1
# A message of ``MeshGroup.compare`` begins with its length and the arguments ``code`` and
# ``number``.
_HEADER_BYTES = 3 * LENGTH_BYTES
# The ranks send one another messages to check that they all make the same call. These messages also
# carry small arrays. The messages of one rank may carry this number of array bytes in total.
_MAX_COMPARED_BYTES = 64 * 1024
_NOTHING = np.empty(0, np.uint8)

# A request that has started, or the error if it could not start. ``MeshGroup.wait`` raises this
# error, because only ``wait`` gets the name of the call.
Started: TypeAlias = Request | ConnectionLostError


class MeshGroup:
    """The ranks of a mesh, which must all make every call.

    The argument ``call`` of each method is the collective call, for error messages.

    Args:
        mesh: The connections between the ranks. ``close`` closes them.
        instances: For each rank, the index of its instance in the communicator.
        limits: The time limits of waits. The time of a wait starts again from 0 whenever bytes were
            sent or received.

    Attributes:
        lost_error: The error of the first wait that failed; later calls raise this error at once.
        lost_instance: Index of the instance that ``lost_error`` names; -1 if it does not name an
            instance.
    """

    def __init__(self, mesh: Mesh, instances: Sequence[int], limits: WaitLimits) -> None:
        self.mesh = mesh
        self._instances = list(instances)
        self._limits = limits
        self.rank = mesh.rank
        self.size = mesh.size
        memory = np.empty((self.size, _HEADER_BYTES + max_compared_bytes(self.size)), np.uint8)
        self._messages = list(memory)
        self._headers = memory[:, :_HEADER_BYTES].view(np.int64)
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1

    # --- Requests -----------------------------------------------------------------------------

    def start_all_reduce(self, array: Array, op: str) -> Started:
        """Start to reduce the flat ``array`` in place; ``wait`` completes the request."""
        return self._started(lambda: self.mesh.start_all_reduce(array, FUNCTIONS[op]))

    def start_round(self, one: Round) -> Started:
        """Start the exchange that the Round ``one`` describes; ``wait`` completes it."""
        return self._started(lambda: self.mesh.start_round(one))

    def _started(self, start: Callable[[], Request]) -> Started:
        if self.lost_error is not None:
            raise self.lost_error
        try:
            return start()
        except ConnectionLostError as error:
            return error

    def wait(self, request: Started, call: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: Another instance has ended, or no bytes arrive within the time limit.
        """
        try:
            if isinstance(request, ConnectionLostError):
                raise request
            self._wait(request, call)
        except ConnectionLostError as error:
            # If this instance has left the group, it closed its connections itself. ``check_abort``
            # then raises an error that does not name another instance.
            self._limits.check_abort(call)
            time.sleep(self._limits.launcher_grace)
            self.lost_instance = self._instances[error.rank]
            self.lost_error = self._limits.host_error(
                self.lost_instance, call, is_silent=error.is_silent
            )
            raise self.lost_error from None
        except InstanceLostError as error:
            self.lost_error = error
            raise

    def _wait(self, request: Request, call: object) -> None:
        waited = WaitTime()
        while not request.is_done:
            has_moved = self.mesh.progress(_POLL_SECONDS)
            self._limits.check_abort(call)
            if has_moved:
                waited = WaitTime()
            elif waited.seconds() > self._limits.seconds(Span.BETWEEN_HOSTS):
                # The error names the ranks whose values are missing. A rank that itself waits for
                # another rank has sent its values, but it cannot send its segment of the result
                # yet.
                unsent = {rank for _, rank in request.unsent}
                missing = request.missing_values or request.missing_sums or unsent
                instances = sorted(self._instances[rank] for rank in missing)
                self.lost_instance = instances[0] if instances else -1
                raise self._limits.late_error(instances, call)

    # --- Calls --------------------------------------------------------------------------------

    def compare(
        self, code: int, number: int, call: object, array: Array = _NOTHING, op: str = "sum"
    ) -> tuple[bool, int]:
        """Return whether all ranks pass the same ``code``, and the largest ``number`` of all ranks.

        Codes have 63 bits. If the codes are equal, this method also reduces the flat ``array`` in
        place, in order of rank. The size of ``array`` is at most ``max_compared_bytes()``.
        """
        end = _HEADER_BYTES + array.nbytes
        self._headers[self.rank] = end, code, number
        if array.size:
            self._messages[self.rank][_HEADER_BYTES:end] = array.view(np.uint8)
        # The activity measurement counts all time in this block as waiting. Sending a small message
        # takes little time, so a long comparison mostly waits for late ranks.
        with activities.doing(activities.WAITING):
            self.wait(self._started(lambda: self.mesh.start_messages(self._messages)), call)
        _, codes, numbers = zip(*self._headers.tolist(), strict=True)
        are_equal = codes.count(code) == self.size
        if are_equal and array.size:
            values = [row[_HEADER_BYTES:end].view(array.dtype) for row in self._messages]
            reduce_in_order(values, FUNCTIONS[op], array)
        return are_equal, max(numbers)

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite the flat ``array`` with the array of rank ``root``."""
        if self.rank == root:
            self._exchange([array] * self.size, [_NOTHING] * self.size, call)
        else:
            incoming = [array if rank == root else _NOTHING for rank in range(self.size)]
            self._exchange([_NOTHING] * self.size, incoming, call)

    def gather_into(self, rows: Sequence[Array], call: object, root: int | None = None) -> None:
        """Send this rank's row to the other ranks, and receive the other ranks' rows.

        Args:
            rows: One flat array for each rank. The arrays may differ in length.
            call: The collective call, for error messages.
            root: The only rank that receives; None if all ranks receive.
        """
        targets = range(self.size) if root is None else (root,)
        outgoing = [rows[self.rank] if rank in targets else _NOTHING for rank in range(self.size)]
        incoming = rows if self.rank in targets else [_NOTHING] * self.size
        self._exchange(outgoing, incoming, call)

    def _exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array], call: object) -> None:
        """Send one array to every other rank, and receive one array from each of them."""
        self.wait(self._started(lambda: self.mesh.start_exchange(outgoing, incoming)), call)

    def all_gather_nodes(
        self, values: Sequence[Array], nodes: Sequence[Sequence[Node]], call: object
    ) -> dict[Node, Array]:
        """Gather the sums of all ranks; return a dict from tree nodes to sums, in order of rank.

        Args:
            values: The sums at the nodes of this rank, which all have the same size.
            nodes: For each rank, the nodes of the reduction tree that this rank holds.
            call: The collective call, for error messages.
        """
        like = values[0]
        rows = [np.empty((len(each), like.size), like.dtype) for each in nodes]
        rows[self.rank][...] = values
        self.gather_into([row.reshape(-1) for row in rows], call)
        return {
            node: value
            for of_rank, row in zip(nodes, rows, strict=True)
            for node, value in zip(of_rank, row, strict=True)
        }

    def leave(self, error: InstanceLostError) -> None:
        """Tell the other ranks that this rank has left; its own later calls raise ``error``."""
        self.lost_error = error
        self.mesh.leave()

    def close(self) -> None:
        """Close the connections."""
        self.mesh.close()


def max_compared_bytes(num_hosts: int) -> int:
    """Return the size of the largest array that ``MeshGroup.compare`` accepts, in bytes."""
    # A multiple of 8 bytes keeps the numbers of all messages aligned.
    return _MAX_COMPARED_BYTES // (num_hosts - 1) // LENGTH_BYTES * LENGTH_BYTES
