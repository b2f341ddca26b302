"""MPI that does not wait for ever: polled calls, with a limit and the names of who is missing.

Importing it initialises MPI.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from popdist_py.collectives.arithmetic import FUNCTIONS, Array
from popdist_py.collectives.between_hosts.tcp import Piece, Wire, WireLostError
from popdist_py.collectives.tree import Node
from popdist_py.collectives.within_host.rendezvous import last_words_seconds
from popdist_py.errors import InstanceLostError

__all__ = ["Lane", "Link"]

_OPERATIONS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_POLLS = 2000
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
# Of a wait on the wire, after which the time-out is looked at.
_LONGEST_WAIT = 0.1
_HERE = 7  # tag of the messages that say "this instance is in call number n"


class Link:
    """The instances of one MPI communicator.

    Args:
        comm: theirs; duplicated, so that no message meets those of others.
        instances: index in the job of each of its ranks.
        hang_timeout: seconds after which a wait is given up.
        grace: seconds more, for those who will be told who is missing by somebody who knows.
    """

    def __init__(
        self, comm: MPI.Comm, instances: Sequence[int], hang_timeout: float, grace: float = 0.0
    ) -> None:
        self._comm = comm.Dup()
        self._instances = list(instances)
        self._hang_timeout = hang_timeout
        self._limit = hang_timeout + grace
        self._calls = 0
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.lost: InstanceLostError | None = None

    def start_all_reduce(self, array: Array, op: str) -> Any:
        """Begin to reduce ``array`` in place; ``finish`` ends it."""
        self._begin()
        logical = array.dtype == np.bool_
        operation = {"sum": MPI.LOR, "prod": MPI.LAND, "max": MPI.LOR, "min": MPI.LAND}.get(op)
        return self._comm.Iallreduce(
            MPI.IN_PLACE, array, op=operation if logical and operation else _OPERATIONS[op]
        )

    def all_reduce(self, array: Array, op: str, doing: object) -> None:
        """Reduce ``array`` in place."""
        self.finish(self.start_all_reduce(array, op), doing)

    def broadcast(self, array: Array, root: int, doing: object) -> None:
        """Overwrite ``array`` with that of rank ``root``."""
        self._begin()
        self.finish(self._comm.Ibcast(array, root=root), doing)

    def all_gather(self, array: Array, doing: object) -> Array:
        """Return the equally large ``array`` of every rank, stacked."""
        self._begin()
        gathered = np.empty((self.size, *array.shape), array.dtype)
        own = np.ascontiguousarray(array).view(np.uint8)
        self.finish(self._comm.Iallgather(own, gathered.view(np.uint8)), doing)
        return gathered

    def all_gather_object(self, value: object, doing: object) -> list[Any]:
        """Return the picklable ``value`` of every rank."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self.all_gather(np.array([data.size]), doing)[:, 0].tolist()
        self._begin()
        everything = np.empty(sum(sizes), np.uint8)
        self.finish(self._comm.Iallgatherv(data, [everything, sizes, MPI.BYTE]), doing)
        ends = np.cumsum(sizes)
        return [
            pickle.loads(everything[end - size : end].tobytes())
            for size, end in zip(sizes, ends, strict=True)
        ]

    def all_gather_nodes(
        self, values: Sequence[Array], nodes: Sequence[Sequence[Node]], doing: object
    ) -> dict[Node, Array]:
        """Return the nodes of all ranks, in order of rank.

        Args:
            values: of this rank's nodes, equally large.
            nodes: of every rank.
            doing: what to call this in messages.
        """
        rows = np.zeros((max(map(len, nodes)), values[0].size), values[0].dtype)
        for row, value in zip(rows, values, strict=False):
            row[:] = value
        gathered = self.all_gather(rows, doing)
        return {
            node: gathered[rank, row]
            for rank, of_rank in enumerate(nodes)
            for row, node in enumerate(of_rank)
        }

    def compare(self, code: int, number: int, doing: object) -> tuple[bool, int]:
        """Tell whether all gave the same ``code``, of at most 63 bits, and the largest number."""
        extremes = np.array([code, -code, number], np.int64)
        self.all_reduce(extremes, "max", doing)
        return bool(extremes[0] == -extremes[1]), int(extremes[2])

    def broadcast_object(self, value: object, root: int, doing: object) -> Any:
        """Return the picklable ``value`` of rank ``root``."""
        data = pickle.dumps(value) if self.rank == root else b""
        size = np.array([len(data)])
        self.broadcast(size, root, doing)
        buffer = np.empty(size[0], np.uint8)
        if self.rank == root:
            buffer[:] = np.frombuffer(data, np.uint8)
        self.broadcast(buffer, root, doing)
        return pickle.loads(buffer.tobytes())

    def close(self) -> None:
        """Give back what is held; MPI's own is MPI's."""

    def _begin(self) -> None:
        if self.lost is not None:
            raise self.lost
        self._calls += 1

    def finish(self, request: Any, doing: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: it is not after the hang time-out.
        """
        for _ in range(_POLLS):
            if request.Test():
                return
        start = time.monotonic()
        pause = _SHORTEST_PAUSE
        announced = False
        while not request.Test():
            waited = time.monotonic() - start
            if not announced and waited > self._limit / 2:
                self._announce()
                announced = True
            if waited > self._limit:
                self.lost = self._error(doing)
                raise self.lost
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _announce(self) -> None:
        """Tell all others which call this instance waits in."""
        for rank in range(self.size):
            if rank != self.rank:
                self._comm.isend(self._calls, rank, _HERE)

    def _error(self, doing: object) -> InstanceLostError:
        missing = [
            instance
            for rank, instance in enumerate(self._instances)
            if rank != self.rank and self._calls not in self._announcements(rank)
        ]
        return self._missing(missing, doing)

    def _missing(self, missing: Sequence[int], doing: object) -> InstanceLostError:
        limit = f"within {self._hang_timeout:g} s (POPDIST_HANG_TIMEOUT)"
        if not missing:
            return InstanceLostError(f"{doing}: all instances arrived, but did not end {limit}")
        words = "instance" if len(missing) == 1 else "instances"
        names = ", ".join(map(str, sorted(missing)))
        return InstanceLostError(f"{doing}: {words} {names} did not arrive {limit}")

    def _announcements(self, rank: int) -> list[int]:
        calls = []
        while self._comm.iprobe(rank, _HERE):
            calls.append(self._comm.recv(None, rank, _HERE))
        return calls


class Lane(Link):
    """One instance of each host: arrays are reduced over a wire of our own, the rest goes by MPI.

    Args:
        comm: as for ``Link``.
        instances: as for ``Link``.
        hang_timeout: as for ``Link``; here of a wait in which nothing at all arrives.
        grace: as for ``Link``.
        wire: between the ranks of ``comm``.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        instances: Sequence[int],
        hang_timeout: float,
        grace: float,
        wire: Wire,
    ) -> None:
        super().__init__(comm, instances, hang_timeout, grace)
        self._wire = wire

    def start_all_reduce(self, array: Array, op: str) -> Piece | WireLostError:
        """Begin to reduce ``array`` in place; ``finish`` ends it, and tells of errors."""
        self._begin()
        try:
            return self._wire.start(array, FUNCTIONS[op])
        except WireLostError as error:
            return error

    def finish(self, request: Any, doing: object) -> None:
        """Return once ``request`` is complete.

        Raises:
            InstanceLostError: another instance has gone, or nothing comes within the time-out.
        """
        if not isinstance(request, Piece | WireLostError):
            super().finish(request, doing)
            return
        try:
            if isinstance(request, WireLostError):
                raise request
            self._wait(request, doing)
        except WireLostError as error:
            time.sleep(last_words_seconds(self._hang_timeout))
            self.lost = InstanceLostError(
                f"{doing}: instance {self._instances[error.rank]} was lost on another host"
            )
            raise self.lost from None

    def _wait(self, piece: Piece, doing: object) -> None:
        last = time.monotonic()
        while not piece.is_done:
            if self._wire.progress(_LONGEST_WAIT):
                last = time.monotonic()
            elif time.monotonic() - last > self._limit:
                # Who waits for a third one itself owes a sum, but no values.
                missing = piece.owing or piece.summing
                self.lost = self._missing([self._instances[rank] for rank in missing], doing)
                raise self.lost

    def close(self) -> None:
        """Close the wire."""
        self._wire.close()
