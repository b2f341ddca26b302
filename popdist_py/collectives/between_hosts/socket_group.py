"""One instance of each host, connected by our TCP connections alone, with a time-out.

Nothing here opens connections or knows the other instances of a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from popdist_py.collectives.arithmetic import FUNCTIONS, Array
from popdist_py.collectives.between_hosts.combined_calls import CombinedCalls, late_error
from popdist_py.collectives.between_hosts.tcp import (
    SILENT_SECONDS,
    ConnectionLostError,
    TcpMesh,
    TcpRequest,
)
from popdist_py.collectives.patience import Patience
from popdist_py.collectives.rounds import Round
from popdist_py.collectives.signature import INSTANCES, Names
from popdist_py.collectives.within_host.host_barrier import launcher_grace_seconds
from popdist_py.errors import InstanceLostError

__all__ = ["SocketGroup"]

# Seconds of one wait; the time-out is checked after each.
_POLL_SECONDS = 0.1
_NOTHING = np.empty(0, np.uint8)

_Started: TypeAlias = TcpRequest | ConnectionLostError


class SocketGroup(CombinedCalls):
    """The ranks of a mesh; satisfies ``between_hosts.linked_group.LinkedGroup``.

    Args:
        mesh: the connections between them; closed with the group.
        instances: index in the job of each rank.
        hang_timeout: seconds after which a wait raises an error, from the last bytes that moved.
        grace: seconds to wait in addition, where another instance will say which one is missing.
        names: of the instances, in messages.

    Attributes:
        hang_timeout: as above; it may be set between two calls.
    """

    def __init__(
        self,
        mesh: TcpMesh,
        instances: Sequence[int],
        hang_timeout: float,
        grace: float,
        names: Names = INSTANCES,
    ) -> None:
        self._names = names
        self._mesh = mesh
        self._instances = list(instances)
        self.hang_timeout = hang_timeout
        self._grace = grace
        self._abort_reason = ""
        self.rank = mesh.rank
        self.size = mesh.size
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1

    # --- Requests -----------------------------------------------------------------------------

    def start_all_reduce(self, array: Array, op: str) -> _Started:
        """Start to reduce ``array`` in place; ``wait`` completes it, and raises its errors."""
        return self._started(lambda: self._mesh.start_all_reduce(array, FUNCTIONS[op]))

    def start_round(self, one: Round, call: object) -> _Started:
        """Start a round; ``wait`` completes it, and raises its errors."""
        return self._started(lambda: self._mesh.start_round(one))

    def start_exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> _Started:
        """Start what ``TcpMesh.start_exchange`` does; ``wait`` completes it."""
        return self._started(lambda: self._mesh.start_exchange(outgoing, incoming))

    def _started(self, start: Callable[[], TcpRequest]) -> _Started:
        if self.lost_error is not None:
            raise self.lost_error
        try:
            return start()
        except ConnectionLostError as error:
            return error

    def wait(self, request: Any, call: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: another instance has ended, or nothing arrives within the time-out.
        """
        try:
            if isinstance(request, ConnectionLostError):
                raise request
            self._wait(request, call)
        except ConnectionLostError as error:
            time.sleep(launcher_grace_seconds(self.hang_timeout))
            self.lost_instance = self._instances[error.rank]
            lost = self._names.of(self.lost_instance)
            self.lost_error = InstanceLostError(
                f"{call}: no answer from {lost} on another host for {SILENT_SECONDS} s: that host "
                "is down, or the network between it and this one"
                if error.is_silent
                else f"{call}: {lost} was lost on another host"
            )
            raise self.lost_error from None

    def _wait(self, request: TcpRequest, call: object) -> None:
        patience = Patience()
        while not request.is_done:
            moved = self._mesh.progress(_POLL_SECONDS)
            if self._abort_reason:
                self.lost_error = InstanceLostError(f"{call}: {self._abort_reason}")
                raise self.lost_error
            if moved:
                patience = Patience()
            elif patience.waited() > self.hang_timeout + self._grace:
                # A rank that itself waits for a third one has sent its values, but no sum.
                missing = request.missing_values or request.missing_sums
                instances = sorted(self._instances[rank] for rank in missing)
                self.lost_instance = instances[0] if instances else -1
                self.lost_error = late_error(instances, call, self.hang_timeout, self._names)
                raise self.lost_error

    # --- Calls --------------------------------------------------------------------------------

    def all_reduce(self, array: Array, op: str, call: object) -> None:
        """Reduce ``array`` in place."""
        self.wait(self.start_all_reduce(array, op), call)

    def exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array], call: object) -> None:
        """Send every other rank its bytes, and receive those that each has for this one."""
        self.wait(self.start_exchange(outgoing, incoming), call)

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite ``array``, flat, with that of rank ``root``."""
        if self.rank == root:
            self.exchange([array] * self.size, [_NOTHING] * self.size, call)
        else:
            incoming = [array if rank == root else _NOTHING for rank in range(self.size)]
            self.exchange([_NOTHING] * self.size, incoming, call)

    def gather_into(self, rows: Sequence[Array], call: object, root: int | None = None) -> None:
        """Fill the row of every other rank with that rank's own, at ``root`` or everywhere.

        Args:
            rows: flat, one for each rank; they may differ in length.
            call: the collective call, as messages name it.
            root: the rank that receives; None for all.
        """
        targets = range(self.size) if root is None else (root,)
        outgoing = [rows[self.rank] if rank in targets else _NOTHING for rank in range(self.size)]
        incoming = rows if self.rank in targets else [_NOTHING] * self.size
        self.exchange(outgoing, incoming, call)

    def gather(self, array: Array, root: int, call: object) -> Array | None:
        """Return the equally large ``array`` of every rank, stacked; None but at ``root``."""
        return self._gathered(array, call, root)

    def all_gather(self, array: Array, call: object) -> Array:
        """Return the equally large ``array`` of every rank, stacked."""
        gathered = self._gathered(array, call, None)
        assert gathered is not None
        return gathered

    def _gathered(self, array: Array, call: object, root: int | None) -> Array | None:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        gathered[self.rank] = array
        self.gather_into(list(gathered.reshape(self.size, array.size)), call, root)
        return gathered if root in (None, self.rank) else None

    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every rank, which may differ in length.

        With a ``root``, only this rank gets them; the others get None.
        """
        sizes = self.all_gather(np.array([data.size]), call)[:, 0].tolist()
        rows = [np.empty(size, np.uint8) for size in sizes]
        rows[self.rank][:] = data
        self.gather_into(rows, call, root)
        return rows if root in (None, self.rank) else None

    def abort(self, reason: str) -> None:
        """Let the wait that another thread is in, and all later ones, raise an error soon."""
        self._abort_reason = reason

    def close(self) -> None:
        """Close the connections."""
        self._mesh.close()
