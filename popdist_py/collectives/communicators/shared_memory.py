"""The communicator over shared memory within a host, and TCP or MPI between the hosts.

It decides which way a call takes. A small array is reduced one-shot: every instance reduces the
slots of all by itself, after one barrier. A large one goes through ``SlicedAllReduce``.

Nothing here maps memory, polls, or reduces by itself.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from popdist_py.collectives.arithmetic import Array, Reduction, dtype_name
from popdist_py.collectives.background import Background
from popdist_py.collectives.between_hosts.polled_mpi import MpiGroup, TcpGroup
from popdist_py.collectives.between_hosts.tcp_connect import connect
from popdist_py.collectives.communicators.sliced_all_reduce import SlicedAllReduce
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup
from popdist_py.collectives.within_host.shared_buffers import SharedBuffers
from popdist_py.collectives.within_host.shared_window import Window
from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from popdist_py.collectives import ReduceOp
    from popdist_py.environment import CollectiveSettings

__all__ = ["SharedCommunicator"]

_MAX_PLANS = 1024
# The number that the first instance of a host passes to the other hosts: where the arrays of its
# host lie, or _FIRST_LOST + index of a lost instance.
_IN_WINDOW, _PRIVATE, _FIRST_LOST = 0, 1, 2
_TCP_WARNING = (
    "popdist: the hosts do not reach one another by TCP on %s: MPI carries the data between them, "
    "which is slower. Open the ports between the hosts, or name another network (--host-subnet)."
)


class SharedCommunicator:
    """All instances of the job; satisfies ``popdist_py.collectives.Communicator``.

    Args:
        world: all instances; rank = instance index.
        local: the instances of this host, in order.
        window: the memory of this host's instances, from ``make_window``.
        settings: the user's.
    """

    def __init__(
        self, world: MPI.Comm, local: MPI.Comm, window: Window, settings: CollectiveSettings
    ) -> None:
        self.instance_index: int = world.Get_rank()
        self.num_instances: int = world.Get_size()
        self.instances: Sequence[int] = range(self.num_instances)
        self.background = Background()
        self._host = HostGroup(local, window, self.instance_index, settings.hang_timeout)
        self._plans: dict[Any, CallPlan] = {}
        self._shared_buffers = SharedBuffers(self._host.position)
        self._connect_hosts(world, settings)

    def _connect_hosts(self, world: MPI.Comm, settings: CollectiveSettings) -> None:
        """Connect the hosts: for each slice, its owners on all hosts form a group."""
        own_host = tuple(self._host.instances)
        hosts = sorted(set(world.allgather(own_host)))
        self.spans_hosts = len(hosts) > 1
        self.host_memory = None if self.spans_hosts else self
        self._slot_bytes = min(world.allgather(self._host.slot_bytes))
        self._world: MpiGroup | None = None
        self._slice_owners: MpiGroup | None = None
        hang_timeout = settings.hang_timeout
        if len(hosts) > 1:
            self._world = MpiGroup(world, range(self.num_instances), hang_timeout)
            self._verdict = Window(self._host.local, 16).parts[0][:16].view(np.int64)
            # A wait for another host has a longer time-out than a wait within that host: its
            # instances know which one is missing, and report it first.
            self._grace = hang_timeout / 4 + 1
            position = self._host.position
            num_owners = min(map(len, hosts))
            comm = world.Split(min(position, num_owners), hosts.index(own_host))
            if position < num_owners:
                owners = [host[position] for host in hosts]
                mesh = connect(comm, settings.network)
                if mesh is None and self.instance_index == 0:
                    logging.getLogger("popdist").warning(
                        _TCP_WARNING, settings.network or "any network"
                    )
                self._slice_owners = (
                    MpiGroup(comm, owners, hang_timeout, self._grace)
                    if mesh is None
                    else TcpGroup(comm, owners, hang_timeout, self._grace, mesh)
                )
        can_read = all(world.allgather(self._host.can_read))
        self._sliced = SlicedAllReduce(
            self._host, hosts, self._slice_owners, self._slot_bytes, can_read
        )

    # --- Collectives --------------------------------------------------------------------------

    def all_reduce(self, array: Array, op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` in place."""
        self.background.drain()
        key = (op, array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, op, name)
        flat = array.reshape(-1)
        if plan.is_one_shot:
            host = self._host
            turn = host.next_turn()
            slots = plan.slots[turn]
            np.copyto(slots[host.position], flat)
            host.wait_for_same_call(plan, turn)
            plan.reduction.reduce_chunk(slots, flat)  # type: ignore[union-attr]
            return
        shared = self._shared_buffers.find(flat)
        location = shared.location if shared else 0
        all_shared, addresses = self._agree(plan, location, flat.ctypes.data)
        if all_shared and shared is not None:
            self._sliced.all_reduce_shared(plan, shared.views)
        else:
            self._sliced.all_reduce_private(plan, flat, addresses)

    def add_replicas(self, leaves: Array) -> None:
        """Add up the rows of all instances in the order of the tree over replicas.

        Raises:
            ValueError: ``leaves`` are not in memory made by ``gradient_buffer``.
        """
        plan = self._plan("add_replicas", "", leaves)
        shared = self._shared_buffers.find(leaves)
        if shared is None:
            raise ValueError("add_replicas: expected leaves in memory made by gradient_buffer()")
        self._agree(plan)
        self._sliced.add_replicas(plan, [view.reshape(leaves.shape) for view in shared.views])

    def reduce_slice(self, array: Array, name: str = "") -> None:
        """Leave in ``own_slice`` of ``array`` the sum over all instances.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """
        self.background.drain()
        key = ("reduce_slice", array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, "sum", name, "reduce_slice")
        shared = self._shared_buffers.find(array.reshape(-1))
        if shared is None:
            raise ValueError("reduce_slice: expected memory made by gradient_buffer()")
        self._agree(plan)
        self._sliced.reduce_scatter_shared(plan, shared.views)

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance reduces."""
        return self._sliced.own_slice(size)

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
        self.background.drain()
        plan = self._plans.get(signature) or self._remember(
            signature, CallPlan(signature, signature.code)
        )
        if self._world is None:
            self._host.wait_for_same_call(plan, self._host.next_turn())
        else:
            self._agree(plan)

    def gradient_buffer(self, num_bytes: int) -> Array:
        """Return zeroed memory that the instances of this host share; collective."""
        self.agree(Signature("gradient_buffer", f"num_bytes={num_bytes}"))
        return self._shared_buffers.add(Window(self._host.local, num_bytes))[:num_bytes]

    def common_buffer(self, num_bytes: int) -> Array:
        """Return zeroed bytes that are the same memory on all instances of this host."""
        self.agree(Signature("common_buffer", f"num_bytes={num_bytes}"))
        return Window(self._host.local, 0, num_bytes).common[:num_bytes]

    def close(self) -> None:
        """Leave the job, after the background calls if no instance was lost."""
        if self._host.barrier.lost_error is None:
            self.background.drain()
        self._host.barrier.close()
        if self._slice_owners is not None:
            self._slice_owners.close()

    # --- Plans --------------------------------------------------------------------------------

    def _plan(
        self, call: str, detail: str = "", array: Array | None = None, name: str = ""
    ) -> CallPlan:
        self.background.drain()
        if array is None:
            signature = Signature(call, detail)
        else:
            signature = Signature(call, detail, dtype_name(array.dtype), array.shape, name)
        return self._plans.get(signature) or self._remember(
            signature, CallPlan(signature, signature.code)
        )

    def _plan_reduction(
        self, key: object, array: Array, op: ReduceOp, name: str, call: str = "all_reduce"
    ) -> CallPlan:
        signature = Signature(call, f"op={op}", dtype_name(array.dtype), array.shape, name)
        reduction = Reduction(op, array.dtype, self.num_instances)
        is_one_shot = (
            self._world is None
            and array.nbytes <= self._host.one_shot_bytes
            and array.size <= reduction.chunk_size
        )
        used_bytes = min(array.size, self._slot_bytes // array.itemsize) * array.itemsize
        first, second = (
            [slot[:used_bytes].view(array.dtype) for slot in slots] for slots in self._host.slots
        )
        return self._remember(
            key, CallPlan(signature, signature.code, reduction, (first, second), is_one_shot)
        )

    def _remember(self, key: object, plan: CallPlan) -> CallPlan:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # --- Agreeing -----------------------------------------------------------------------------

    def _agree(self, plan: CallPlan, location: int = 0, address: int = 0) -> tuple[bool, list[int]]:
        """Wait for all instances of the job.

        Args:
            plan: of the call.
            location: of the array in the windows, 0 if it lies outside.
            address: of the array in this process.

        Returns:
            Whether the arrays lie at one location in the windows of each host; and the addresses of
            the arrays in the processes of this host.

        Raises:
            CollectiveMismatchError: the instances make different calls.
        """
        host, barrier = self._host, self._host.barrier
        turn = host.next_turn()
        try:
            same = barrier.compare(turn, plan.code, plan.signature, location, address)
        except InstanceLostError:
            self._compare_hosts(plan, _FIRST_LOST + barrier.lost_instance)
            raise
        locations, addresses = barrier.published(turn)
        all_shared = location != 0 and all(other == location for other in locations)
        if self._world is None:
            if not same:
                raise mismatch(host.descriptions(plan.signature))
            return all_shared, addresses
        self._compare_hosts(plan, _IN_WINDOW if all_shared else _PRIVATE, same=same)
        barrier.wait_for_all(plan.signature, 2 * self._grace)
        calls_are_equal, number = self._verdict.tolist()
        if number >= _FIRST_LOST:
            barrier.lost_error = InstanceLostError(
                f"{plan.signature}: instance {number - _FIRST_LOST} was lost on another host"
            )
            raise barrier.lost_error
        if not calls_are_equal:
            raise mismatch(self._world.all_gather_object(str(plan.signature), plan.signature))
        return number == _IN_WINDOW, addresses

    def _compare_hosts(self, plan: CallPlan, number: int, same: bool = False) -> None:
        """On the first instance of each host, compare the calls of all hosts.

        The result goes into ``_verdict``, which the instances of the host share: whether the calls
        are equal, and the largest ``number`` of all hosts.
        """
        if self._slice_owners is not None and self._host.position == 0:
            self._verdict[:] = self._slice_owners.compare(
                plan.code if same else 0, number, plan.signature
            )
            self._verdict[0] &= same


_BARRIER = Signature("barrier")


def _rows_of_bytes(array: Array) -> list[Array]:
    flat = array.reshape(array.shape[0], -1)
    return [row.view(np.uint8) for row in flat]
