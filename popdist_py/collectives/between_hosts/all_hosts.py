"""Broadcast, gather and all-gather between all instances of several hosts.

The instances of a host copy their bytes to the first instance of the host. The first instances of
all hosts exchange these bytes. Then each first instance copies the received bytes to the other
instances of its host. So the same data are never sent twice between two hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup
from popdist_py.collectives.signature import Signature
from popdist_py.collectives.waiting import Span
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup
from popdist_py.collectives.within_host.shared_window import Window
from popdist_py.errors import InstanceLostError

__all__ = ["AllHosts"]

# Instances compare the codes of their CallPlans to check that they make the same call. The callers
# of this module have already made this check, so all CallPlans of this module have one code.
_AGREED_CODE = 1
_NOTHING = np.empty(0, np.uint8)


class AllHosts:
    """All instances of several hosts, which must all call the constructor and every method.

    The argument ``call`` of each method is the collective call, for error messages.

    Args:
        host: The instances of this host.
        hosts: For every host, the indices of its instances.
        first: The group of the first instances of all hosts; None on the other instances.

    Attributes:
        lost_error: The error of the first wait that failed; None if no wait has failed.
        lost_instance: Index of the instance that ``lost_error`` names; -1 if there is none.
    """

    def __init__(
        self,
        host: HostGroup,
        hosts: Sequence[Sequence[int]],
        first: MeshGroup | None,
    ) -> None:
        self._host = host
        self._first = first
        self._own_host = [tuple(each) for each in hosts].index(tuple(host.instances))
        order = [instance for each in hosts for instance in each]
        # For each host, the slice of ``order`` that contains the host's instances.
        ends = np.cumsum([len(each) for each in hosts]).tolist()
        self._hosts = [slice(end - len(each), end) for each, end in zip(hosts, ends, strict=True)]
        self._places = np.argsort(order)
        self._is_in_order = order == sorted(order)
        self.rank = host.instances[host.position]
        self.size = len(order)
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1
        # If an instance of another host is lost, this number in shared memory is the instance's
        # index plus 1; otherwise it is 0. The first instance of this host writes ``_missed``.
        self._missed = Window(host.local, 8).parts[0][:8].view(np.int64)

    # --- Between the hosts --------------------------------------------------------------------

    def _exchange(self, call: object, exchange: Callable[[MeshGroup], None]) -> None:
        """Run ``exchange`` on the first instance of the host; the other instances wait for it.

        Raises:
            InstanceLostError: An instance of some host was lost. All instances of this host name
                the same lost instance.
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
        barrier.wait_for_all(call, Span.FOR_FIRST)
        missed = int(self._missed[0]) - 1
        if missed >= 0:
            found = InstanceLostError(
                f"{call}: {self._host.names.of(missed)} on another host was lost"
            )
            self._lose(found, missed)
            raise found

    def _lose(self, error: InstanceLostError, instance: int) -> None:
        self.lost_error = self._host.barrier.lost_error = error
        self.lost_instance = self._host.barrier.lost_instance = instance

    def _collect(self, data: Array, sizes: Sequence[int], call: object, root: int | None) -> Array:
        """Return the bytes of all instances, ordered by host.

        If ``root`` is given, the result is valid on the instance ``root`` only.

        Args:
            data: The data of this instance.
            sizes: Size of each instance's data, ordered by host.
            call: The collective call, for error messages.
            root: The only instance that receives the bytes; None if all instances receive them.
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
        """Return the host of an instance, and the position of the instance on that host."""
        place = int(self._places[instance])
        index = next(i for i, each in enumerate(self._hosts) if place < each.stop)
        return index, place - self._hosts[index].start

    # --- Calls --------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite the flat ``array`` with the array of instance ``root``."""
        host, plan = self._host, _plan_of(call)
        data = array.view(np.uint8)
        root_host, position = self._home(root)
        if self._own_host == root_host:
            host.broadcast(data, position, plan)
        self._exchange(call, lambda first: first.broadcast(data, root_host, call))
        if self._own_host != root_host:
            host.broadcast(data, 0, plan)

    def all_gather(self, array: Array, call: object) -> Array:
        """Return the stacked arrays of all instances, which must have the same size."""
        return self._stacked(self._collected(array, call, None), array)

    def gather(self, array: Array, root: int, call: object) -> Array | None:
        """On ``root``, return the stacked arrays of all instances; elsewhere, return None."""
        everything = self._collected(array, call, root)
        return self._stacked(everything, array) if self.rank == root else None

    def _collected(self, array: Array, call: object, root: int | None) -> Array:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._collect(data, [data.size] * self.size, call, root)

    def _stacked(self, everything: Array, array: Array) -> Array:
        """Convert the bytes of all instances to arrays like ``array``, in order of instance."""
        gathered = everything.view(array.dtype).reshape(self.size, *array.shape)
        return gathered if self._is_in_order else gathered[self._places]

    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every instance, which may differ in length.

        If ``root`` is given, the other instances get None instead of the bytes.
        """
        of_instances = self.all_gather(np.array([data.size]), call)[:, 0]
        sizes = of_instances[np.argsort(self._places)].tolist()
        everything = self._collect(data, sizes, call, root)
        if root not in (None, self.rank):
            return None
        rows = np.split(everything, np.cumsum(sizes)[:-1])
        return [rows[place] for place in self._places]

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the description of every instance's call, for the error that the calls differ."""
        rows = self.gather_bytes(np.frombuffer(signature.description.encode(), np.uint8), signature)
        return [row.tobytes().decode() for row in rows or ()]


def _plan_of(call: object) -> CallPlan:
    return CallPlan(cast("Signature", call), _AGREED_CODE)
