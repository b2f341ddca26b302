"""Communication of the instances over MPI: MpiMeeting for small values, and MpiMesh for arrays.

The instances of a job use MpiMeeting to exchange small values while they connect to one another.
MpiMesh carries the arrays between hosts if TCP is not available or not wanted.
Importing this module initialises MPI.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.between_hosts.mesh import (
    SUMS,
    VALUES,
    ConnectionLostError,
    Mesh,
    Request,
)
from popdist_py.collectives.waiting import WaitLimits, WaitTime

__all__ = ["MpiMeeting", "MpiMesh"]

# Arrays above this size are sent in several messages, because MPI counts the bytes of a message in
# 31 bits.
_MAX_BYTES = 2**30
# A wait first polls MPI this number of times without a pause, so that short waits end at once.
_POLLS = 2000
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
# A rank sends an empty message with this tag when it leaves. All other messages of an MpiMesh use
# their channel as the tag.
_LEFT = max(VALUES, SUMS) + 1
_NOTHING = np.empty(0, np.uint8)
# The number of message tags that every MPI implementation supports.
_NUM_TAGS = 32767

# The MPI requests for the parts of one array, and a function to call once all requests are
# complete.
_Transfer: TypeAlias = tuple[list[MPI.Request], Callable[[], None]]


class MpiMeeting:
    """The processes of an MPI communicator; satisfies the protocol ``JobMeeting``.

    Args:
        comm: The communicator of the processes. No other code may use this communicator.
    """

    # Only MPI_Finalize frees the MPI communicators. All instances would have to call
    # ``MPI_Comm_free`` in the same order. Instances close their groups in different orders, and a
    # lost instance does not close its groups. There are few MPI communicators, because each group
    # of instances connects only once.

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""
        # mpi4py's allgather() is not used, because it would unpickle the received data. This would
        # be unsafe, because any process may write to MPI's sockets.
        own = json.dumps(value).encode()
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(own)]), sizes)
        texts = bytearray(int(sizes.sum()))
        self._comm.Allgatherv(own, [texts, sizes, MPI.BYTE])
        ends = np.cumsum(sizes)
        return [json.loads(texts[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        own = json.dumps(value).encode() if self.rank == 0 else b""
        size = np.array([len(own)])
        self._comm.Bcast(size)
        text = bytearray(own) or bytearray(int(size[0]))
        self._comm.Bcast([text, MPI.BYTE])
        return json.loads(text)

    def split(self, color: int, key: int) -> MpiMeeting:
        """Return an MpiMeeting of the ranks that pass the same ``color``, in order of ``key``."""
        return MpiMeeting(self._comm.Split(color, key))

    def group(self, ranks: Sequence[int], limits: WaitLimits, call: object) -> MpiMeeting:
        """Return an MpiMeeting of the ranks in ``ranks``. Only these ranks call this method, once.

        Raises:
            InstanceLostError: A rank did not call this method in time.
        """
        self._wait_for(ranks, limits, call)
        group = self._comm.Get_group().Incl(list(ranks))
        return MpiMeeting(MPI.Intracomm(self._comm).Create_group(group))

    def _wait_for(self, ranks: Sequence[int], limits: WaitLimits, call: object) -> None:
        """Exchange an empty message with each of the other ranks.

        MPI's own calls would wait for a missing rank without a time limit and would not handle
        signals.
        """
        tag = zlib.crc32(repr(list(ranks)).encode()) % _NUM_TAGS
        others = [rank for rank in ranks if rank != self.rank]
        messages = {rank: self._comm.Irecv([_NOTHING, MPI.BYTE], rank, tag) for rank in others}
        for rank in others:
            self._comm.Isend([_NOTHING, MPI.BYTE], rank, tag).Free()
        waited, pause = WaitTime(), _SHORTEST_PAUSE
        try:
            while missing := [rank for rank, message in messages.items() if not message.Test()]:
                if waited.seconds() > limits.hang_timeout:
                    raise limits.late_error(missing, call)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            for message in filter(None, messages.values()):  # messages of missing ranks
                message.Cancel()
                message.Free()

    @property
    def own_mesh(self) -> Callable[[MpiMeeting], MpiMesh]:
        """The function that makes a mesh over MPI between the processes of an MpiMeeting."""
        return MpiMeeting.mesh

    def mesh(self) -> MpiMesh:
        """Return a mesh over MPI between these processes, which must all call this method."""
        return MpiMesh(self._comm.Dup())


class MpiMesh(Mesh):
    """The processes of an MPI communicator.

    Args:
        comm: The communicator of the processes. No other code may use this communicator.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._transfers: list[_Transfer] = []

    def leave(self) -> None:
        """Send every other rank an empty message whose tag means that this rank has left."""
        for rank in self._others:
            self._comm.Isend([_NOTHING, MPI.BYTE], rank, _LEFT)

    def close(self) -> None:
        """Do nothing, because mpi4py frees the resources of MPI."""

    def _send(self, channel: int, rank: int, array: Array, request: Request) -> None:
        def sent() -> None:
            request.unsent.discard((channel, rank))

        messages = [self._comm.Isend(part, rank, channel) for part in _parts(array)]
        if MPI.Request.Testall(messages):  # MPI copies a short message at once
            sent()
        else:
            self._transfers.append((messages, sent))

    def _receive(self, channel: int, rank: int, array: Array, missing: set[int]) -> None:
        messages = [self._comm.Irecv(part, rank, channel) for part in _parts(array)]
        self._transfers.append((messages, lambda: missing.discard(rank)))

    def _receive_message(self, rank: int, memory: Array, missing: set[int]) -> None:
        # MPI transmits the length of each message, so a message may be shorter than ``memory``.
        self._receive(VALUES, rank, memory, missing)

    def progress(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until an array is completely sent or received.

        Returns:
            Whether an array was completely sent or received.

        Raises:
            ConnectionLostError: Another rank has left.
        """
        if not self._transfers:
            return False
        for _ in range(_POLLS):
            if self._complete_some():
                return True
        deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
        while time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if self._complete_some():
                return True
        self._check_for_ranks_that_left()
        return False

    def _check_for_ranks_that_left(self) -> None:
        status = MPI.Status()
        if self._comm.Iprobe(MPI.ANY_SOURCE, _LEFT, status):
            raise ConnectionLostError(status.Get_source())

    def _complete_some(self) -> bool:
        """Complete all arrays whose messages are done; return whether an array was completed."""
        waiting = [one for one in self._transfers if not _is_complete(*one)]
        if len(waiting) == len(self._transfers):
            return False
        self._transfers = waiting
        self._advance()
        return True


def _is_complete(messages: list[MPI.Request], complete: Callable[[], None]) -> bool:
    """Tell whether all messages of a transfer are done; if so, call ``complete``."""
    is_complete = MPI.Request.Testall(messages)
    if is_complete:
        complete()
    return is_complete


def _parts(array: Array) -> list[list[Any]]:
    """Divide a flat array into messages that are small enough for MPI."""
    data = array.view(np.uint8)
    starts = range(0, data.size, _MAX_BYTES)
    return [[data[start : start + _MAX_BYTES], MPI.BYTE] for start in starts]
