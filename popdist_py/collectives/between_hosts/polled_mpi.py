"""Collectives over MPI with a time-out: non-blocking calls are polled, and errors name instances.

Importing this module initialises MPI. Nothing here opens sockets or shares memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.between_hosts.combined_calls import CombinedCalls, late_error
from popdist_py.collectives.between_hosts.socket_group import SocketGroup
from popdist_py.collectives.between_hosts.tcp import TcpMesh
from popdist_py.collectives.patience import Patience
from popdist_py.collectives.rounds import Round
from popdist_py.errors import InstanceLostError

__all__ = ["MpiGroup", "TcpGroup"]

_OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_POLLS = 2000
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
# MPI counts the bytes of one message in 31 bits, those of all instances together.
_MAX_BYTES = 2**30
# Tag of the messages that say "this instance waits in call number n".
_ANNOUNCEMENT_TAG = 7


class MpiGroup(CombinedCalls):
    """The instances of one MPI communicator.

    Args:
        comm: their communicator; duplicated, so that messages do not mix with those of others.
        instances: index in the job of each rank of ``comm``.
        hang_timeout: seconds after which a wait raises an error.
        grace: seconds to wait in addition, where another instance will say which one is missing.
    """

    def __init__(
        self, comm: MPI.Comm, instances: Sequence[int], hang_timeout: float, grace: float = 0.0
    ) -> None:
        self._comm = comm.Dup()
        self._instances = list(instances)
        self.hang_timeout = hang_timeout
        self._timeout = hang_timeout + grace
        self._num_calls = 0
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.lost_error: InstanceLostError | None = None
        self._told: list[MPI.Request] = []  # each keeps what it sends
        self.lost_instance = -1

    def start_all_reduce(self, array: Array, op: str) -> Any:
        """Start to reduce ``array`` in place; ``wait`` completes it."""
        self._start_call()
        is_logical = array.dtype == np.bool_
        logical = {"sum": MPI.LOR, "prod": MPI.LAND, "max": MPI.LOR, "min": MPI.LAND}.get(op)
        return self._comm.Iallreduce(
            MPI.IN_PLACE, array, op=logical if is_logical and logical else _OPERATIONS[op]
        )

    def all_reduce(self, array: Array, op: str, call: object) -> None:
        """Reduce ``array`` in place."""
        self.wait(self.start_all_reduce(array, op), call)

    def start_round(self, one: Round, call: object) -> Any:
        """Exchange what a round says; ``wait`` completes it. Here it is done at once."""
        own = one.outgoing[self.rank].nbytes
        received = np.empty((self.size, own), np.uint8)
        self._start_call()
        sent = [array.view(np.uint8) for array in one.outgoing]
        self.wait(
            self._comm.Ialltoallv(
                [np.concatenate(sent), [array.nbytes for array in sent], MPI.BYTE],
                [received, [own] * self.size, MPI.BYTE],
            ),
            call,
        )
        one.combine([row.view(one.outgoing[self.rank].dtype) for row in received])
        if one.results:
            sizes = [array.nbytes for array in one.results]
            gathered = np.empty(sum(sizes), np.uint8)
            self._start_call()
            result = one.results[self.rank].view(np.uint8)
            self.wait(self._comm.Iallgatherv(result, [gathered, sizes, MPI.BYTE]), call)
            for array, end in zip(one.results, np.cumsum(sizes), strict=True):
                array.view(np.uint8)[:] = gathered[end - array.nbytes : end]
        return MPI.REQUEST_NULL

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite ``array``, flat, with that of rank ``root``."""
        step = _MAX_BYTES // array.itemsize
        for start in range(0, max(1, array.size), step):
            self._start_call()
            self.wait(self._comm.Ibcast(array[start : start + step], root=root), call)

    def gather(self, array: Array, root: int, call: object) -> Array | None:
        """Return the equally large ``array`` of every rank, stacked; None but at ``root``."""
        rows = self.gather_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8), call, root)
        if rows is None:
            return None
        return np.stack([row.view(array.dtype).reshape(array.shape) for row in rows])

    def all_gather(self, array: Array, call: object) -> Array:
        """Return the equally large ``array`` of every rank, stacked."""
        self._start_call()
        gathered = np.empty((self.size, *array.shape), array.dtype)
        own = np.ascontiguousarray(array).view(np.uint8)
        self.wait(self._comm.Iallgather(own, gathered.view(np.uint8)), call)
        return gathered

    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every rank, which may differ in length.

        With a ``root``, only this rank gets them; the others get None.
        """
        sizes = self.all_gather(np.array([data.size]), call)[:, 0].tolist()
        receives = root is None or root == self.rank
        rows = [np.empty(size, np.uint8) for size in sizes] if receives else None
        step = _MAX_BYTES // self.size
        for start in range(0, max(1, *sizes), step):
            counts = [min(max(size - start, 0), step) for size in sizes]
            pieces = np.empty(sum(counts), np.uint8)
            own = data[start : start + step]
            self._start_call()
            if root is None:
                request = self._comm.Iallgatherv(own, [pieces, counts, MPI.BYTE])
            else:
                into = [pieces, counts, MPI.BYTE] if receives else None
                request = self._comm.Igatherv(own, into, root)
            self.wait(request, call)
            for row, end, count in zip(rows or (), np.cumsum(counts), counts, strict=False):
                row[start : start + count] = pieces[end - count : end]
        return rows

    def close(self) -> None:
        """Do nothing: mpi4py frees what belongs to MPI."""

    def abort(self, reason: str) -> None:
        """Let all later calls raise an error."""
        self.lost_error = InstanceLostError(reason)

    def _start_call(self) -> None:
        if self.lost_error is not None:
            raise self.lost_error
        self._num_calls += 1

    def wait(self, request: Any, call: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: it is not complete after the hang time-out.
        """
        for _ in range(_POLLS):
            if request.Test():
                return
        patience = Patience()
        pause = _SHORTEST_PAUSE
        announced = False
        while not request.Test():
            waited = patience.waited()
            if not announced and waited > self._timeout / 2:
                self._announce()
                announced = True
            if waited > self._timeout:
                self.lost_error = self._timeout_error(call)
                raise self.lost_error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _announce(self) -> None:
        """Tell all other ranks which call this instance waits in."""
        number = np.array([self._num_calls])
        self._told += [
            self._comm.Isend(number, rank, _ANNOUNCEMENT_TAG)
            for rank in range(self.size)
            if rank != self.rank
        ]

    def _timeout_error(self, call: object) -> InstanceLostError:
        missing = [
            instance
            for rank, instance in enumerate(self._instances)
            if rank != self.rank and self._num_calls not in self._announcements(rank)
        ]
        return late_error(missing, call, self.hang_timeout)

    def _announcements(self, rank: int) -> list[int]:
        calls = []
        while self._comm.Iprobe(rank, _ANNOUNCEMENT_TAG):
            number = np.zeros(1, np.int64)
            self._comm.Recv(number, rank, _ANNOUNCEMENT_TAG)
            calls.append(int(number[0]))
        return calls


class TcpGroup(MpiGroup):
    """One instance of each host: arrays are reduced over our TCP connections, all else over MPI.

    Args:
        comm: as for ``MpiGroup``.
        instances: as for ``MpiGroup``.
        hang_timeout: as for ``MpiGroup``, but counted from the last bytes that were moved.
        grace: as for ``MpiGroup``.
        mesh: the connections between the ranks of ``comm``.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        instances: Sequence[int],
        hang_timeout: float,
        grace: float,
        mesh: TcpMesh,
    ) -> None:
        super().__init__(comm, instances, hang_timeout, grace)
        self._sockets = SocketGroup(mesh, instances, hang_timeout, grace)

    def start_all_reduce(self, array: Array, op: str) -> Any:
        """Start to reduce ``array`` in place; ``wait`` completes it, and raises its errors."""
        self._start_call()
        return self._sockets.start_all_reduce(array, op)

    def start_round(self, one: Round, call: object) -> Any:
        """Start a round; ``wait`` completes it, and raises its errors."""
        self._start_call()
        return self._sockets.start_round(one, call)

    def wait(self, request: Any, call: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: another instance has ended, or nothing arrives within the time-out.
        """
        if isinstance(request, MPI.Request):
            super().wait(request, call)
            return
        try:
            self._sockets.wait(request, call)
        except InstanceLostError as error:
            self.lost_error = error
            raise

    def close(self) -> None:
        """Close the connections."""
        self._sockets.close()
