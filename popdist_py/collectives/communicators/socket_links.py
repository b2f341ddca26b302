"""The links between hosts without MPI: TCP connections of one instance of each host.

What all instances exchange goes through the memory of each host to its first instance, between the
first instances, and back: so nothing travels between two hosts twice.

Nothing here maps memory but that of one number, nor opens sockets itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.between_hosts.linked_group import LinkedGroup
from popdist_py.collectives.between_hosts.socket_group import SocketGroup
from popdist_py.collectives.between_hosts.tcp_connect import connect
from popdist_py.collectives.meeting import Meeting
from popdist_py.collectives.signature import INSTANCES, Names, Signature
from popdist_py.collectives.sized_broadcast import sized_broadcast
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup
from popdist_py.collectives.within_host.shared_window import Window
from popdist_py.environment import NETWORK, CollectiveSettings
from popdist_py.errors import InstanceLostError, PopdistError

__all__ = ["HostsGroup", "SocketLinks"]

# The instances have compared the call before it comes here.
_AGREED_CODE = 1
_NOTHING = np.empty(0, np.uint8)


class SocketLinks:
    """Connects the hosts of a group; satisfies ``communicators.shared_memory.Links``.

    Args:
        meeting: all instances; rank = instance index.
        settings: the user's.
        towards: a host that all hosts reach by the network between them, if none is set.
        names: of the instances, in messages.
    """

    def __init__(
        self,
        meeting: Meeting,
        settings: CollectiveSettings,
        towards: str | None = None,
        names: Names = INSTANCES,
    ) -> None:
        self._names = names
        self._meeting = meeting
        self._settings = settings
        self._towards = towards

    def owners(
        self, color: int, key: int, owners: Sequence[int] | None, grace: float
    ) -> SocketGroup | None:
        """Return the group of one instance of each host, or None for one that owns no slice.

        Raises:
            PopdistError: the hosts do not reach one another; raised on all instances.
        """
        members = self._meeting.split(color, key)
        network = self._settings.network
        mesh = connect(members, network, self._towards) if owners is not None else None
        if not all(self._meeting.all_gather(mesh is not None or owners is None)):
            if mesh is not None:
                mesh.close()
            raise PopdistError(_unreachable(network, self._towards))
        if mesh is None or owners is None:
            return None
        return SocketGroup(mesh, owners, self._settings.hang_timeout, grace, self._names)

    def all_instances(
        self, host: HostGroup, hosts: Sequence[Sequence[int]], owners: LinkedGroup | None
    ) -> HostsGroup:
        """Return the group of all instances; collective."""
        first = owners if host.position == 0 and isinstance(owners, SocketGroup) else None
        return HostsGroup(host, hosts, first, self._settings.hang_timeout)


class HostsGroup:
    """All instances of several hosts; satisfies ``between_hosts.linked_group.MovingGroup``.

    Args:
        host: the instances of this host.
        hosts: index of the instances of every host.
        first: the first instances of all hosts; None but on them.
        hang_timeout: seconds after which a wait raises an error.
    """

    def __init__(
        self,
        host: HostGroup,
        hosts: Sequence[Sequence[int]],
        first: SocketGroup | None,
        hang_timeout: float,
    ) -> None:
        self._host = host
        self._first = first
        self._own_host = [tuple(each) for each in hosts].index(tuple(host.instances))
        order = [instance for each in hosts for instance in each]
        # Where the bytes of each host's instances begin and end, if they lie host after host.
        ends = np.cumsum([len(each) for each in hosts]).tolist()
        self._hosts = [slice(end - len(each), end) for each, end in zip(hosts, ends, strict=True)]
        self._places = np.argsort(order)
        self._is_in_order = order == sorted(order)
        self.rank = host.instances[host.position]
        self.size = len(order)
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1
        # 1 + the instance that the first instance of this host has missed on another host.
        self._missed = Window(host.local, 8).parts[0][:8].view(np.int64)
        # The first instance waits for other hosts for longer than others wait within a host.
        self._grace = hang_timeout / 2 + 2

    # --- Between the hosts --------------------------------------------------------------------

    def _exchange(self, call: object, exchange: Callable[[SocketGroup], None]) -> None:
        """Let the first instance do its part with the other hosts; the others wait for it.

        Raises:
            InstanceLostError: an instance of any host was lost; the same on all of this host.
        """
        barrier = self._host.barrier
        if self._first is not None:
            try:
                exchange(self._first)
            except InstanceLostError as error:
                self._missed[0] = 1 + self._first.lost_instance
                if self._missed[0]:
                    barrier.wait_for_all(call)
                self._lose(error, self._first.lost_instance)
                raise
        barrier.wait_for_all(call, self._grace)
        missed = int(self._missed[0]) - 1
        if missed >= 0:
            found = InstanceLostError(
                f"{call}: {self._host.names.of(missed)} was lost on another host"
            )
            self._lose(found, missed)
            raise found

    def _lose(self, error: InstanceLostError, instance: int) -> None:
        self.lost_error = self._host.barrier.lost_error = error
        self.lost_instance = self._host.barrier.lost_instance = instance

    def _collect(self, data: Array, sizes: Sequence[int], call: object, root: int | None) -> Array:
        """Return the bytes of all instances, host after host; at ``root`` alone if it is given.

        Args:
            data: of this instance.
            sizes: of the data of each, host after host.
            call: the collective call, as messages name it.
            root: the instance that receives; None for all.
        """
        host, plan = self._host, _plan_of(call)
        bounds = np.concatenate(([0], np.cumsum(sizes))).tolist()
        blocks = [slice(bounds[each.start], bounds[each.stop]) for each in self._hosts]
        own = self._hosts[self._own_host]
        root_host, root_position = (None, 0) if root is None else self._home(root)
        receives = root_host in (None, self._own_host)
        keeps = host.position == 0 or (receives and root in (None, self.rank))
        everything = np.empty(bounds[-1] if keeps else 0, np.uint8)
        rows: list[Array] = []
        if host.position == 0:
            rows = [everything[bounds[i] : bounds[i + 1]] for i in range(own.start, own.stop)]
        host.gather(data, rows, max(sizes[own]), plan)
        self._exchange(
            call,
            lambda first: first.gather_into([everything[b] for b in blocks], call, root_host),
        )
        if root is None:
            host.broadcast(everything, 0, plan)
        elif receives and root_position != 0:
            into = [everything, *[_NOTHING] * (host.size - 1)] if self.rank == root else ()
            given = everything if host.position == 0 else _NOTHING
            host.gather(given, into, bounds[-1], plan)
        return everything

    def _home(self, instance: int) -> tuple[int, int]:
        """Return the host of an instance, and its position there."""
        place = int(self._places[instance])
        index = next(i for i, each in enumerate(self._hosts) if place < each.stop)
        return index, place - self._hosts[index].start

    # --- Calls --------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite ``array``, flat, with that of instance ``root``."""
        host, plan = self._host, _plan_of(call)
        data = array.view(np.uint8)
        root_host, position = self._home(root)
        if self._own_host == root_host:
            host.broadcast(data, position, plan)
        self._exchange(call, lambda first: first.broadcast(data, root_host, call))
        if self._own_host != root_host:
            host.broadcast(data, 0, plan)

    def broadcast_bytes(self, data: Array, root: int, call: object) -> Array:
        """Return the bytes ``data`` of instance ``root``; what the others pass does not matter."""
        return sized_broadcast(
            lambda flat: self.broadcast(flat, root, call), data, is_root=self.rank == root
        )

    def all_gather(self, array: Array, call: object) -> Array:
        """Return the equally large ``array`` of every instance, stacked."""
        return self._stacked(self._collected(array, call, None), array)

    def gather(self, array: Array, root: int, call: object) -> Array | None:
        """Return the equally large ``array`` of every instance, stacked; None but at ``root``."""
        everything = self._collected(array, call, root)
        return self._stacked(everything, array) if self.rank == root else None

    def _collected(self, array: Array, call: object, root: int | None) -> Array:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._collect(data, [data.size] * self.size, call, root)

    def _stacked(self, everything: Array, array: Array) -> Array:
        """Return the bytes of all instances as arrays like ``array``, in their order."""
        gathered = everything.view(array.dtype).reshape(self.size, *array.shape)
        return gathered if self._is_in_order else gathered[self._places]

    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every instance, which may differ in length.

        With a ``root``, only this instance gets them; the others get None.
        """
        of_instances = self.all_gather(np.array([data.size]), call)[:, 0]
        sizes = of_instances[np.argsort(self._places)].tolist()
        everything = self._collect(data, sizes, call, root)
        if root not in (None, self.rank):
            return None
        rows = np.split(everything, np.cumsum(sizes)[:-1])
        return [rows[place] for place in self._places]

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the description of every call, after all have seen that calls differ."""
        rows = self.gather_bytes(np.frombuffer(signature.description.encode(), np.uint8), signature)
        return [row.tobytes().decode() for row in rows or ()]


def _plan_of(call: object) -> CallPlan:
    return CallPlan(cast("Signature", call), _AGREED_CODE)


def _unreachable(network: str | None, towards: str | None) -> str:
    tried = network or (f"the network towards {towards}" if towards else "that of the host's name")
    return (
        f"the hosts do not reach one another by TCP on {tried}: open the ports between the hosts, "
        f"or name another network, by interface or CIDR (poprun-py --host-subnet, {NETWORK}, or "
        "GLOO_SOCKET_IFNAME)"
    )
