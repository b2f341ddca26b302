"""The communicator over shared memory within a host, and MPI between the hosts.

Decides which way a call takes: a small array goes through the window, where every instance reduces
everybody's by itself, with one meeting; a large one through ``Exchange``.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from popdist_py.collectives.arithmetic import Array, Reduction, dtype_name
from popdist_py.collectives.background import Background
from popdist_py.collectives.between_hosts.polled_mpi import Lane, Link
from popdist_py.collectives.between_hosts.tcp_connect import connect
from popdist_py.collectives.communicators.sliced_all_reduce import Exchange
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.within_host.host_group import Host, Plan
from popdist_py.collectives.within_host.shared_buffers import Buffers
from popdist_py.collectives.within_host.shared_window import Window
from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from popdist_py.collectives import ReduceOp
    from popdist_py.environment import CollectiveSettings

__all__ = ["SharedCommunicator"]

_MOST_PLANS = 1024
# What the first instance of a host tells the other hosts about its own.
_IN_PLACE, _ELSEWHERE, _FIRST_LOST = 0, 1, 2
_SLOWER = (
    "popdist: the hosts do not reach one another by TCP on %s: MPI carries the data between them, "
    "which is slower. Open the ports between the hosts, or name another network (--host-subnet)."
)


class SharedCommunicator:
    """All instances of the job; satisfies ``popdist_py.collectives.Communicator``.

    Args:
        world: all of them; rank = instance index.
        local: those of this host, in order.
        window: theirs, made by ``window_for``.
        settings: the user's.
    """

    def __init__(
        self, world: MPI.Comm, local: MPI.Comm, window: Window, settings: CollectiveSettings
    ) -> None:
        self.instance_index: int = world.Get_rank()
        self.num_instances: int = world.Get_size()
        self.instances: Sequence[int] = range(self.num_instances)
        self.background = Background()
        self._host = Host(local, window, self.instance_index, settings.hang_timeout)
        self._plans: dict[Any, Plan] = {}
        self._buffers = Buffers(self._host.position)
        self._connect_hosts(world, settings)

    def _connect_hosts(self, world: MPI.Comm, settings: CollectiveSettings) -> None:
        """Link the hosts: one lane for each slice, between its owners on all hosts."""
        here = tuple(self._host.instances)
        hosts = sorted(set(world.allgather(here)))
        self.spans_hosts = len(hosts) > 1
        self.host_memory = None if self.spans_hosts else self
        self._slot_bytes = min(world.allgather(self._host.slot_bytes))
        self._world: Link | None = None
        self._lane: Link | None = None
        limit = settings.hang_timeout
        if len(hosts) > 1:
            self._world = Link(world, range(self.num_instances), limit)
            self._verdict = Window(self._host.local, 16).parts[0][:16].view(np.int64)
            # Whoever waits for a host waits longer than those on it, who know whom they miss.
            self._grace = limit / 4 + 1
            position = self._host.position
            num_owners = min(map(len, hosts))
            comm = world.Split(min(position, num_owners), hosts.index(here))
            if position < num_owners:
                fellows = [host[position] for host in hosts]
                wire = connect(comm, settings.network)
                if wire is None and self.instance_index == 0:
                    logging.getLogger("popdist").warning(_SLOWER, settings.network or "any network")
                self._lane = (
                    Link(comm, fellows, limit, self._grace)
                    if wire is None
                    else Lane(comm, fellows, limit, self._grace, wire)
                )
        can_read = all(world.allgather(self._host.can_read))
        self._exchange = Exchange(self._host, hosts, self._lane, self._slot_bytes, can_read)

    # --- Collectives --------------------------------------------------------------------------

    def all_reduce(self, array: Array, op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` in place."""
        self.background.settle()
        key = (op, array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, op, name)
        flat = array.reshape(-1)
        if plan.at_once:
            host = self._host
            turn = host.next_turn()
            slots = plan.slots[turn]
            np.copyto(slots[host.position], flat)
            host.meet(plan, turn)
            plan.reduction.chunked(slots, flat)  # type: ignore[union-attr]
            return
        found = self._buffers.find(flat)
        in_place, addresses = self._agree(plan, found.number if found else 0, flat.ctypes.data)
        if in_place and found is not None:
            self._exchange.in_place(plan, found.views)
        else:
            self._exchange.outside(plan, flat, addresses)

    def add_replicas(self, leaves: Array) -> None:
        """Add up the rows of all instances in the order of the tree over replicas.

        Raises:
            ValueError: ``leaves`` are not in memory made by ``gradient_buffer``.
        """
        plan = self._plan("add_replicas", "", leaves)
        found = self._buffers.find(leaves)
        if found is None:
            raise ValueError("add_replicas: expected leaves in memory made by gradient_buffer()")
        self._agree(plan)
        self._exchange.add_replicas(plan, [view.reshape(leaves.shape) for view in found.views])

    def reduce_slice(self, array: Array, name: str = "") -> None:
        """Leave in ``own_slice`` of ``array`` the sum over all instances.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """
        self.background.settle()
        key = ("reduce_slice", array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, "sum", name, "reduce_slice")
        found = self._buffers.find(array.reshape(-1))
        if found is None:
            raise ValueError("reduce_slice: expected memory made by gradient_buffer()")
        self._agree(plan)
        self._exchange.only_own_slice(plan, found.views)

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance answers for."""
        return self._exchange.own_slice(size)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite ``array`` with the one of instance ``root``."""
        plan = self._plan("broadcast", f"root={root}", array)
        data = array.reshape(-1).view(np.uint8)
        if self._world is None:
            self._host.broadcast(data, root, plan)
        else:
            self._agree(plan)
            self._world.broadcast(data, root, plan.signature)

    def all_gather(self, array: Array, name: str = "") -> Array:
        """Return the arrays of all instances, stacked."""
        plan = self._plan("all_gather", "", array, name)
        if self._world is not None:
            self._agree(plan)
            return self._world.all_gather(array, plan.signature)
        gathered = np.empty((self.num_instances, *array.shape), array.dtype)
        self._host.gather(array.reshape(-1).view(np.uint8), _rows_of_bytes(gathered), plan)
        return gathered

    def all_gather_object(self, value: object) -> list[Any]:
        """Return the value of every instance, in instance order."""
        plan = self._plan("all_gather")
        if self._world is not None:
            self._agree(plan)
            return self._world.all_gather_object(value, plan.signature)
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros((self.num_instances, 1), np.int64)
        self._host.gather(np.array([data.size]).view(np.uint8), _rows_of_bytes(sizes), plan)
        gathered = [np.empty(size, np.uint8) for size in sizes[:, 0].tolist()]
        self._host.gather(data, gathered, plan)
        return [pickle.loads(row.tobytes()) for row in gathered]

    def broadcast_object(self, value: object, root: int = 0) -> Any:
        """Return the value of instance ``root``."""
        plan = self._plan("broadcast", f"root={root}")
        if self._world is not None:
            self._agree(plan)
            return self._world.broadcast_object(value, root, plan.signature)
        data = pickle.dumps(value) if self.instance_index == root else b""
        size = np.array([len(data)])
        self._host.broadcast(size.view(np.uint8), root, plan)
        received = np.empty(size[0], np.uint8)
        if self.instance_index == root:
            received[:] = np.frombuffer(data, np.uint8)
        self._host.broadcast(received, root, plan)
        return pickle.loads(received.tobytes())

    def barrier(self) -> None:
        """Return once every instance has called this."""
        self.agree(_BARRIER)

    def agree(self, signature: Signature) -> None:
        """Return once all instances make the call ``signature``."""
        self.background.settle()
        plan = self._plans.get(signature) or self._keep(signature, Plan(signature, signature.code))
        if self._world is None:
            self._host.meet(plan, self._host.next_turn())
        else:
            self._agree(plan)

    def gradient_buffer(self, num_bytes: int) -> Array:
        """Return zeroed memory that the instances of this host share; collective."""
        self.agree(Signature("gradient_buffer", f"num_bytes={num_bytes}"))
        return self._buffers.add(Window(self._host.local, num_bytes))[:num_bytes]

    def common_buffer(self, num_bytes: int) -> Array:
        """Return zeroed bytes that are the same memory on all instances of this host."""
        self.agree(Signature("common_buffer", f"num_bytes={num_bytes}"))
        return Window(self._host.local, 0, num_bytes).common[:num_bytes]

    def close(self) -> None:
        """Leave: what runs in the background is finished, if the others are still there."""
        if self._host.rendezvous.lost is None:
            self.background.settle()
        self._host.rendezvous.close()
        if self._lane is not None:
            self._lane.close()

    # --- Plans --------------------------------------------------------------------------------

    def _plan(
        self, call: str, detail: str = "", array: Array | None = None, name: str = ""
    ) -> Plan:
        self.background.settle()
        if array is None:
            signature = Signature(call, detail)
        else:
            signature = Signature(call, detail, dtype_name(array.dtype), array.shape, name)
        return self._plans.get(signature) or self._keep(signature, Plan(signature, signature.code))

    def _plan_reduction(
        self, key: object, array: Array, op: ReduceOp, name: str, call: str = "all_reduce"
    ) -> Plan:
        signature = Signature(call, f"op={op}", dtype_name(array.dtype), array.shape, name)
        reduction = Reduction(op, array.dtype, self.num_instances)
        at_once = (
            self._world is None
            and array.nbytes <= self._host.at_once_bytes
            and array.size <= reduction.chunk
        )
        length = min(array.size, self._slot_bytes // array.itemsize) * array.itemsize
        first, second = ([slot[:length].view(array.dtype) for slot in s] for s in self._host.slots)
        return self._keep(key, Plan(signature, signature.code, reduction, (first, second), at_once))

    def _keep(self, key: object, plan: Plan) -> Plan:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # --- Agreeing -----------------------------------------------------------------------------

    def _agree(self, plan: Plan, place: int = 0, address: int = 0) -> tuple[bool, list[int]]:
        """Wait for all instances of the job.

        Args:
            plan: of the call.
            place: where the array lies in the windows, 0 for elsewhere.
            address: of the array in this process.

        Returns:
            Whether the array lies at one place in the windows of each host, and its addresses in
            the processes of this host.

        Raises:
            CollectiveMismatchError: the instances are in different calls.
        """
        host, meeting = self._host, self._host.rendezvous
        turn = host.next_turn()
        try:
            same = meeting.meet(turn, plan.code, plan.signature, place, address)
        except InstanceLostError:
            self._tell_hosts(plan, _FIRST_LOST + meeting.lost_instance)
            raise
        places, addresses = meeting.shown(turn)
        in_place = place != 0 and all(other == place for other in places)
        if self._world is None:
            if not same:
                raise mismatch(host.calls(plan.signature))
            return in_place, addresses
        self._tell_hosts(plan, _IN_PLACE if in_place else _ELSEWHERE, same=same)
        meeting.wait_for_all(plan.signature, 2 * self._grace)
        equal, number = self._verdict.tolist()
        if number >= _FIRST_LOST:
            meeting.lost = InstanceLostError(
                f"{plan.signature}: instance {number - _FIRST_LOST} was lost on another host"
            )
            raise meeting.lost
        if not equal:
            raise mismatch(self._world.all_gather_object(str(plan.signature), plan.signature))
        return number == _IN_PLACE, addresses

    def _tell_hosts(self, plan: Plan, number: int, same: bool = False) -> None:
        """As the first of this host, compare what the instances of all hosts call.

        What all have to know goes into the verdict: whether the calls are equal, and the largest
        number that the first of a host gave.
        """
        if self._lane is not None and self._host.position == 0:
            self._verdict[:] = self._lane.compare(plan.code if same else 0, number, plan.signature)
            self._verdict[0] &= same


_BARRIER = Signature("barrier")


def _rows_of_bytes(array: Array) -> list[Array]:
    flat = array.reshape(array.shape[0], -1)
    return [row.view(np.uint8) for row in flat]
