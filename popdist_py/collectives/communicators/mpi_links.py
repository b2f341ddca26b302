"""What MPI gives a communicator: the meeting of its instances, and the groups between hosts.

Importing it initialises MPI. Nothing here shares memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from popdist_py.collectives.between_hosts.linked_group import LinkedGroup
from popdist_py.collectives.between_hosts.polled_mpi import MpiGroup, TcpGroup
from popdist_py.collectives.between_hosts.tcp_connect import connect
from popdist_py.collectives.within_host.host_group import HostGroup
from popdist_py.environment import CollectiveSettings

__all__ = ["MpiLinks", "MpiMeeting"]

_TCP_WARNING = (
    "popdist: the hosts do not reach one another by TCP on %s: MPI carries the data between them, "
    "which is slower. Open the ports between the hosts, or name another network (--host-subnet)."
)


class MpiMeeting:
    """The processes of an MPI communicator; satisfies ``popdist_py.collectives.meeting.Meeting``.

    Args:
        comm: their communicator.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""
        # Not mpi4py's allgather(): it unpickles what came, and MPI's sockets know no secret.
        own = json.dumps(value).encode()
        sizes = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([len(own)]), sizes)
        texts = bytearray(int(sizes.sum()))
        self.comm.Allgatherv(own, [texts, sizes, MPI.BYTE])
        ends = np.cumsum(sizes)
        return [json.loads(texts[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        own = json.dumps(value).encode() if self.rank == 0 else b""
        size = np.array([len(own)])
        self.comm.Bcast(size)
        text = bytearray(own) or bytearray(int(size[0]))
        self.comm.Bcast([text, MPI.BYTE])
        return json.loads(text)

    def split(self, color: int, key: int) -> MpiMeeting:
        """Return the meeting of those that pass the same ``color``, in order of ``key``."""
        return MpiMeeting(self.comm.Split(color, key))


class MpiLinks:
    """Connects the hosts of a job; satisfies ``communicators.shared_memory.Links``.

    Args:
        world: all instances; rank = instance index.
        settings: the user's.
    """

    def __init__(self, world: MPI.Comm, settings: CollectiveSettings) -> None:
        self._world = world
        self._settings = settings

    def all_instances(
        self, host: HostGroup, hosts: Sequence[Sequence[int]], owners: LinkedGroup | None
    ) -> MpiGroup:
        """Return the group of all instances; collective."""
        return MpiGroup(self._world, range(self._world.Get_size()), self._settings.hang_timeout)

    def owners(
        self, color: int, key: int, owners: Sequence[int] | None, grace: float
    ) -> MpiGroup | None:
        """Return the group of one instance of each host, or None for one that owns no slice.

        All instances make the call: those with one ``color`` form a group, in order of ``key``.
        """
        comm = self._world.Split(color, key)
        if owners is None:
            return None
        hang_timeout = self._settings.hang_timeout
        mesh = connect(MpiMeeting(comm), self._settings.network)
        if mesh is not None:
            return TcpGroup(comm, owners, hang_timeout, grace, mesh)
        if self._world.Get_rank() == 0:
            logging.getLogger("popdist").warning(
                _TCP_WARNING, self._settings.network or "any network"
            )
        return MpiGroup(comm, owners, hang_timeout, grace)
