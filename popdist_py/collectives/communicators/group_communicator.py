"""The communicator of several instances, over shared memory within a host and a mesh between hosts.

The communicator chooses the algorithm for each call. Small arrays are reduced in one shot. Every
instance copies its array to its slot, a part of the shared memory. After a single barrier, every
instance reduces the slots of all instances. Before each call, the instances check that all of them
make the same call. With several hosts, the messages for this check also carry small arrays.
``SlicedAllReduce`` reduces large arrays. ``TreeReduction`` reduces floats if their bits must not
depend on the hosts.

This module itself does not map memory, poll or reduce arrays. This file has over 500 lines, because
its class contains all calls that a communicator offers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from popdist_py.collectives.arithmetic import Array, Reduction, dtype_name
from popdist_py.collectives.background import Background
from popdist_py.collectives.between_hosts.all_hosts import AllHosts
from popdist_py.collectives.between_hosts.mesh import Mesh
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup, max_compared_bytes
from popdist_py.collectives.communicators.compressed_all_reduce import CompressedAllReduce
from popdist_py.collectives.communicators.given_arrays import GivenArrayCalls
from popdist_py.collectives.communicators.interrupted_calls import (
    ends_if_interrupted,
    is_interrupt,
    numeric_errors_last,
)
from popdist_py.collectives.communicators.sliced_all_reduce import SlicedAllReduce
from popdist_py.collectives.communicators.tree_reduction import TreeReduction
from popdist_py.collectives.objects import ObjectCalls
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.waiting import Span, WaitLimits
from popdist_py.collectives.within_host.host_exchange import HostExchange
from popdist_py.collectives.within_host.host_group import (
    Agreement,
    CallPlan,
    HostGroup,
    exposed,
)
from popdist_py.collectives.within_host.shared_buffers import SharedBuffers
from popdist_py.collectives.within_host.shared_window import Window, WindowError
from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from popdist_py.collectives import AnyReduceOp
    from popdist_py.collectives.compression_rounds import Compression
    from popdist_py.collectives.interfaces import Meeting

__all__ = ["ConnectHosts", "GroupCommunicator", "Links"]

_MAX_PLANS = 1024
# The hosts check that they make the same collective call. For this check, the first instance of
# each host sends one of these numbers to the other hosts. _IN_WINDOW means that all arrays of the
# host are in shared memory; _PRIVATE means that some are not. _FIRST_LOST + i means that instance i
# is lost.
_IN_WINDOW, _PRIVATE, _FIRST_LOST = 0, 1, 2
# This location means that an array is outside the shared memory but may be moved into it. The
# location of an array in shared memory is at least 1 << 48.
_MOVABLE = 1


class Links(NamedTuple):
    """The connections between hosts.

    Attributes:
        mesh: The connections of this instance to other hosts; None if it has no connections.
        use_tcp: Whether TCP carries the data between the hosts. If ``use_tcp`` is False, MPI
            carries the data.
    """

    mesh: Mesh | None
    use_tcp: bool


# A function that connects one instance of each host. The arguments of the function are the color
# and the key for ``Meeting.split``, and whether this instance takes part.
ConnectHosts = Callable[..., Links]


class GroupCommunicator(GivenArrayCalls, ObjectCalls):
    """The communicator of several instances; satisfies ``popdist_py.collectives.Communicator``.

    Args:
        world: A Meeting of all instances of the communicator, in the order of their indices.
        local: A Meeting of the instances of this host, in the order of their indices.
        window: The shared memory of the instances of this host, from ``make_window``.
        limits: The time limits of waits, and the names of instances in error messages.
        connect_hosts: A function that connects one instance of each host.
        instances: The index of each instance in the job; None for all instances of the job.
        shares_memory: Whether the instances of a host share memory. If ``shares_memory`` is False,
            every instance is treated as a separate host.
        in_tree_order: Whether an instance needs results whose bits do not depend on the hosts. If
            any instance does, all instances reduce floats in the order of a fixed tree.

    Attributes:
        meeting: The argument ``world``.
        links_use_tcp: Whether TCP carries the data between hosts. With a single host, this
            attribute is True.
    """

    def __init__(
        self,
        world: Meeting,
        local: Meeting,
        window: Window,
        limits: WaitLimits,
        connect_hosts: ConnectHosts,
        instances: Sequence[int] | None = None,
        *,
        shares_memory: bool = True,
        in_tree_order: bool = False,
    ) -> None:
        self.meeting = world
        self.names = limits.names
        self.instance_index = world.rank
        self.num_instances = world.size
        self.instances = range(self.num_instances) if instances is None else instances
        self._is_whole_job = instances is None
        self._limits = limits
        self.background = Background()
        self._host = HostGroup(local, window, self.instance_index, limits)
        self._plans: dict[Any, CallPlan] = {}
        self._shared_buffers = SharedBuffers(self._host.position)
        self._may_move = self.num_instances > 1
        self._in_tree_order = any(world.all_gather(in_tree_order))
        self._connect_hosts(world, connect_hosts, shares_memory=shares_memory)

    def _connect_hosts(
        self, world: Meeting, connect_hosts: ConnectHosts, *, shares_memory: bool
    ) -> None:
        """Connect this instance to the owner of the same slice on every other host."""
        own_host = tuple(self._host.instances)
        self.hosts: Sequence[Sequence[int]] = sorted(set(map(tuple, world.all_gather(own_host))))
        hosts = self.hosts
        self.spans_hosts = len(hosts) > 1
        self.host_memory = None if self.spans_hosts else self
        self.host_links = self if self.spans_hosts and shares_memory else None
        self._slot_bytes = min(world.all_gather(self._host.slot_bytes))
        self._world: AllHosts | None = None
        self._slice_owners: MeshGroup | None = None
        self.links_use_tcp = True
        if len(hosts) > 1:
            self._verdict = Window(self._host.local, 16).parts[0][:16].view(np.int64)
            position = self._host.position
            num_owners = min(map(len, hosts))
            mesh, self.links_use_tcp = connect_hosts(
                min(position, num_owners), hosts.index(own_host), takes_part=position < num_owners
            )
            if mesh is not None:
                owners = [host[position] for host in hosts]
                self._slice_owners = MeshGroup(mesh, owners, self._limits)
            first = self._slice_owners if position == 0 else None
            self._world = AllHosts(self._host, hosts, first)
        can_read = all(world.all_gather(self._host.can_read))
        self._sliced = SlicedAllReduce(
            self._host, hosts, self._slice_owners, self._slot_bytes, can_read
        )
        self._tree = TreeReduction(self._host, hosts, self._slice_owners, self._sliced.own_parts)
        self._exchange = HostExchange(self._host)
        self._compressed = CompressedAllReduce(self._host, self._slice_owners, min(map(len, hosts)))

    # --- Collectives --------------------------------------------------------------------------

    def all_reduce(
        self,
        array: Array,
        op: AnyReduceOp = "sum",
        name: str = "",
        move: Callable[[Array], None] | None = None,
    ) -> None:
        """Reduce ``array`` in place.

        Args:
            array: A contiguous array.
            op: The operation that combines the elements.
            name: A name for the call, which must be the same on all instances.
            move: A function that moves the array to the shared memory that it gets as its argument.
                ``move`` is called after the first reduction of a large array outside the shared
                memory, if every instance of this host passes ``move``.
        """
        try:
            if self.background.last is not None:
                self.background.drain()
            key = (op, array.dtype, array.shape, name)
            plan = self._plans.get(key) or self._plan_reduction(key, array, op, name)
            flat = array.reshape(-1)
            if plan.one_shot is not None:
                self._host.reduce_one_shot(plan, flat, flat)
            else:
                self._reduce(plan, flat, move)
        except BaseException as error:
            self.end_if_interrupted("all_reduce", error)
            raise

    def _reduce(
        self, plan: CallPlan, flat: Array, move: Callable[[Array], None] | None = None
    ) -> None:
        """Reduce ``flat`` in place in several steps. See ``all_reduce`` for ``move``."""
        if plan.in_tree_order:
            with numeric_errors_last():
                self._tree.all_reduce(plan, flat, self._agree)
            return
        if plan.is_compared_with_data:
            with numeric_errors_last():
                self._reduce_with_comparison(plan, flat)
            return
        shared = self._shared_buffers.find(flat)
        if shared is None:
            self._sliced.publish_first_slot(plan, flat)
        movable = _MOVABLE if move is not None and self._may_move else 0
        location = shared.location if shared else movable
        with numeric_errors_last(), exposed(flat):
            agreement = self._agree(plan, location, flat.ctypes.data)
            if agreement.all_in_window and shared is not None:
                self._sliced.all_reduce_shared(plan, shared.views)
            else:
                self._sliced.all_reduce_private(plan, flat, agreement, is_published=shared is None)
        if agreement.all_movable and move is not None:
            self._share(flat.nbytes, move)

    def _reduce_with_comparison(self, plan: CallPlan, flat: Array) -> None:
        """Reduce a small array in place; only the first instance of each host uses the mesh."""
        host = self._host
        plan.slots[host.coming_turn][host.position][: flat.size] = flat
        self._agree(plan, flat=flat)
        flat[...] = plan.results[host.current_turn][: flat.size]

    def _share(self, num_bytes: int, move: Callable[[Array], None]) -> None:
        """Move an array of each instance of this host to a new window of shared memory."""
        try:
            memory = self._shared_buffers.add(Window(self._host.local, num_bytes))
        except WindowError:  # all instances of the host raise this error
            self._may_move = False
        else:
            move(memory[:num_bytes])

    @ends_if_interrupted
    @np.errstate(all="ignore")  # an error would leave other started sums unfinished
    def start_compressed(self, array: Array, compression: Compression, name: str = "") -> None:
        """Start to sum ``array`` over all instances in place; data between hosts is compressed.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """
        self.background.drain()
        call = f"all_reduce[{compression.name}]"
        key = (call, array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, "sum", name, call)
        shared = self._shared_buffers.find(array.reshape(-1))
        if shared is None:
            raise ValueError("start_compressed: expected an array that gradient_buffer() has made")
        self._agree(plan)
        self._compressed.start(plan, shared.views, compression)

    @ends_if_interrupted
    @np.errstate(all="ignore")  # an error would leave other started sums unfinished
    def finish_compressed(self) -> None:
        """Wait until the oldest unfinished compressed sum is complete."""
        self.background.drain()
        self._compressed.finish()

    @ends_if_interrupted
    def add_replicas(self, leaves: Array) -> None:
        """Sum the rows of all instances in the order of the fixed tree over all replicas.

        Raises:
            ValueError: ``leaves`` is not in memory made by ``gradient_buffer``.
        """
        plan = self._plan("add_replicas", None, leaves)
        shared = self._shared_buffers.find(leaves)
        if shared is None:
            raise ValueError(
                "add_replicas: expected leaves in an array that gradient_buffer() has made"
            )
        self._agree(plan)
        views = [view.reshape(leaves.shape) for view in shared.views]
        with numeric_errors_last():
            self._tree.reduce_rows(plan, views)

    @ends_if_interrupted
    def reduce_slice(self, array: Array, name: str = "") -> None:
        """Sum ``array`` over all instances, and store only this instance's slice of the sum.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """
        self.background.drain()
        key = ("reduce_slice", array.dtype, array.shape, name)
        plan = self._plans.get(key) or self._plan_reduction(key, array, "sum", name, "reduce_slice")
        shared = self._shared_buffers.find(array.reshape(-1))
        if shared is None:
            raise ValueError("reduce_slice: expected an array that gradient_buffer() has made")
        self._agree(plan)
        with numeric_errors_last():
            self._sliced.reduce_scatter_shared(plan, shared.views)

    def reduce_scatter(self, array: Array, op: AnyReduceOp = "sum", name: str = "") -> Array:
        """Reduce ``array`` over all instances, and return this instance's block of the result."""
        try:
            self.background.drain()
            key = ("reduce_scatter", op, array.dtype, array.shape, name)
            plan = self._plans.get(key) or self._plan_reduction(key, array, op, name, key[0])
            count = self.num_instances
            block = np.empty((array.shape[0] // count, *array.shape[1:]), array.dtype)
            self._reduce_scatter(plan, array, block.reshape(-1))
        except BaseException as error:
            self.end_if_interrupted("reduce_scatter", error)
            raise
        return block

    def own_slice(self, size: int) -> slice:
        """Return this instance's slice of an array with ``size`` elements."""
        return self._sliced.own_slice(size)

    def broadcast(self, array: Array, root: int = 0, name: str = "") -> None:
        """Overwrite ``array`` with the array of instance ``root``."""
        try:
            plan = self._plan("broadcast", root, array, name)
            data = array.reshape(-1).view(np.uint8)
            index = root if self._is_whole_job else self.instances.index(root)
            if self._world is None:
                self._host.broadcast(data, index, plan)
            else:
                self._agree(plan)
                self._world.broadcast(data, index, plan.signature)
        except BaseException as error:
            self.end_if_interrupted("broadcast", error)
            raise

    @ends_if_interrupted
    def all_gather(self, array: Array, name: str = "") -> Array:
        """Return the arrays of all instances, stacked along a new first dimension."""
        plan = self._plan("all_gather", None, array, name)
        if self._world is not None:
            self._agree(plan)
            return self._world.all_gather(array, plan.signature)
        return self._gather_on_host(array, plan)

    @ends_if_interrupted
    def gather(self, array: Array, root: int = 0, name: str = "") -> Array | None:
        """On ``root``, return the stacked arrays of all instances; elsewhere, return None."""
        plan = self._plan("gather", root, array, name)
        if self._world is not None:
            self._agree(plan)
            return self._world.gather(array, self.instances.index(root), plan.signature)
        if root == self.instances[self.instance_index]:
            return self._gather_on_host(array, plan)
        self._host.gather(array.reshape(-1).view(np.uint8), (), array.nbytes, plan)
        return None

    def _gather_on_host(self, array: Array, plan: CallPlan) -> Array:
        gathered = np.empty((self.num_instances, *array.shape), array.dtype)
        self._fill_rows(array, gathered.reshape(self.num_instances, array.size), plan)
        return gathered

    @ends_if_interrupted
    def _gather_bytes(
        self, data: Array, signature: Signature, root: int | None = None
    ) -> list[Array] | None:
        plan, rank = self._plan_of(signature), None if root is None else self.instances.index(root)
        if self._world is not None:
            self._agree(plan)
            return self._world.gather_bytes(data, signature, rank)
        return self._host.gather_bytes(data, plan, rank)

    @ends_if_interrupted
    def _broadcast_bytes(self, data: Array, signature: Signature, root: int) -> Array:
        plan, root = self._plan_of(signature), self.instances.index(root)
        if self._world is not None:
            self._agree(plan)
        size = np.array([data.size])
        self._broadcast_flat(size.view(np.uint8), root, plan)
        received = data.copy() if root == self.instance_index else np.empty(size[0], np.uint8)
        self._broadcast_flat(received, root, plan)
        return received

    def _broadcast_flat(self, data: Array, root: int, plan: CallPlan) -> None:
        """Overwrite ``data`` with that of instance ``root``, an index within the communicator."""
        if self._world is None:
            self._host.broadcast(data, root, plan)
        else:
            self._world.broadcast(data, root, plan.signature)

    def barrier(self) -> None:
        """Return once every instance has called ``barrier``."""
        self.agree(_BARRIER)

    def agree(self, signature: Signature) -> None:
        """Check that all instances pass an equal ``signature``; return once all have passed it."""
        try:
            plan = self._plan_of(signature)
            if self._world is None:
                self._host.wait_for_same_call(plan, self._host.next_turn())
            else:
                self._agree(plan)
        except BaseException as error:
            self.end_if_interrupted(signature.call, error)
            raise

    @ends_if_interrupted
    def gradient_buffer(self, num_bytes: int) -> Array:
        """Return zeroed memory that this host's instances share.

        All instances of the communicator must call this method.
        """
        self.agree(Signature("gradient_buffer", f"num_bytes={num_bytes}"))
        return self._shared_buffers.add(Window(self._host.local, num_bytes))[:num_bytes]

    @ends_if_interrupted
    def common_buffer(self, num_bytes: int) -> Array:
        """Return a zeroed buffer in memory that all instances of this host share."""
        self.agree(Signature("common_buffer", f"num_bytes={num_bytes}"))
        return Window(self._host.local, 0, num_bytes).common[:num_bytes]

    def end_if_interrupted(self, call: str, error: BaseException) -> None:
        """Leave the group if ``error`` has interrupted a call; later calls raise an error.

        In a forked child this method does nothing. A forked child shares memory with its parent, so
        the other instances would believe that the parent has left.
        """
        background = self.background
        if not is_interrupt(error) or background.is_forked or background.is_refusing:
            return
        reason = (
            f"this instance left the group when its call {call} was interrupted by "
            f"{type(error).__name__}"
        )
        refusal = InstanceLostError(reason)
        self._limits.abort_reason = reason
        background.refuse(refusal)
        # File descriptors stay open until ``close``, because another thread may still use them.
        self._host.barrier.leave(refusal)
        if self._slice_owners is not None:
            self._slice_owners.leave(refusal)

    def close(self) -> None:
        """Wait for the background calls, unless an instance was lost; then leave the group.

        In a forked child this method does nothing. A forked child shares memory with its parent, so
        the other instances would believe that the parent has left.
        """
        if self.background.is_forked:
            return
        if self._host.barrier.lost_error is None and not self.background.is_refusing:
            self.background.drain()
        self.background.end()
        self._host.close()
        if self._slice_owners is not None:
            self._slice_owners.close()

    # --- Plans --------------------------------------------------------------------------------

    def _plan(self, call: str, root: int | None, array: Array, name: str = "") -> CallPlan:
        self.background.drain()
        key = (call, root, array.dtype, array.shape, name)
        plan = self._plans.get(key)
        if plan is None:
            detail = "" if root is None else f"root={root}"
            signature = Signature(call, detail, dtype_name(array.dtype), array.shape, name)
            plan = self._remember(key, CallPlan(signature, signature.code))
        return plan

    def _plan_of(self, signature: Signature) -> CallPlan:
        self.background.drain()
        return self._plans.get(signature) or self._remember(
            signature, CallPlan(signature, signature.code)
        )

    def _plan_reduction(
        self, key: object, array: Array, op: AnyReduceOp, name: str, call: str = "all_reduce"
    ) -> CallPlan:
        signature = Signature(call, f"op={op}", dtype_name(array.dtype), array.shape, name)
        reduction = Reduction(op, array.dtype, self.num_instances)
        in_tree_order = self._in_tree_order and reduction.rounds and call != "reduce_slice"
        if (
            self._world is not None
            or in_tree_order
            or call == "reduce_slice"
            or array.nbytes > self._host.one_shot_bytes
            or array.size > reduction.chunk_size
        ):
            num_bytes = self._slot_bytes // array.itemsize * array.itemsize
            slots = self._slots_as(array.dtype, num_bytes // array.itemsize)
            results = tuple(part[:num_bytes].view(array.dtype) for part in self._host.results)
            plan = CallPlan(signature, signature.code, reduction, slots, results)
            plan.in_tree_order = in_tree_order
            if self._world is not None:
                num_bytes = array.size * reduction.accumulate_dtype.itemsize
                plan.is_compared_with_data = num_bytes <= max_compared_bytes(len(self.hosts))
            return self._remember(key, plan)
        slots = self._slots_as(array.dtype, array.size)
        one_shot = slots
        if call == "reduce_scatter":
            size = array.size // self.num_instances
            own = slice(self._host.position * size, (self._host.position + 1) * size)
            one_shot = ([slot[own] for slot in slots[0]], [slot[own] for slot in slots[1]])
        plan = CallPlan(signature, signature.code, reduction, slots, one_shot=one_shot)
        return self._remember(key, plan)

    def _slots_as(self, dtype: np.dtype[Any], size: int) -> tuple[list[Array], list[Array]]:
        """Return the first ``size`` elements of each instance's slot 0, and of each slot 1."""
        num_bytes = size * dtype.itemsize
        first, second = (
            [slot[:num_bytes].view(dtype) for slot in slots] for slots in self._host.slots
        )
        return first, second

    def _remember(self, key: object, plan: CallPlan) -> CallPlan:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    # --- Comparing calls ----------------------------------------------------------------------

    def _agree(
        self, plan: CallPlan, location: int = 0, address: int = 0, flat: Array | None = None
    ) -> Agreement:
        """Wait for all instances of the communicator, and compare their calls.

        Args:
            plan: Plan of the call.
            location: The location of the array in shared memory. ``_MOVABLE`` means that the array
                may be moved to shared memory. Location 0 means that the array stays outside the
                shared memory.
            address: Address of the array in this process.
            flat: A small array, which the caller has copied to this instance's slot for the next
                step. ``flat`` is reduced over all instances into ``plan.results``.

        Raises:
            CollectiveMismatchError: The instances make different calls.
        """
        host, barrier = self._host, self._host.barrier
        turn = host.next_turn()
        try:
            same = barrier.compare(turn, plan.code, plan.signature, location, address)
        except InstanceLostError:
            # If ``lost_instance`` is negative, this communicator was aborted and no other instance
            # was lost. The other hosts are then told that this instance is lost.
            lost = barrier.lost_instance if barrier.lost_instance >= 0 else self.instance_index
            self._compare_hosts(plan, _FIRST_LOST + lost)
            raise
        locations, addresses = barrier.published(turn)
        all_equal = location != 0 and all(other == location for other in locations)
        all_movable = all_equal and location == _MOVABLE
        all_shared = all_equal and not all_movable
        some_shared = address != 0 and any(other not in (0, _MOVABLE) for other in locations)
        if self._world is None:
            if not same:
                raise mismatch(host.descriptions(plan.signature), host.instances, self.names)
            return Agreement(all_shared, some_shared, all_movable, addresses)
        self._compare_hosts(plan, _IN_WINDOW if all_shared else _PRIVATE, same, flat)
        barrier.wait_for_all(plan.signature, Span.FOR_FIRST)
        calls_are_equal, number = self._verdict.tolist()
        if number >= _FIRST_LOST:
            barrier.lost_error = InstanceLostError(
                f"{plan.signature}: {self.names.of(number - _FIRST_LOST)} on another host was lost"
            )
            raise barrier.lost_error
        if not calls_are_equal:
            calls = self._world.descriptions(plan.signature)
            raise mismatch(calls, range(self.num_instances), self.names)
        return Agreement(number == _IN_WINDOW, some_shared, all_movable, addresses)

    def _compare_hosts(
        self, plan: CallPlan, number: int, same: bool = False, flat: Array | None = None
    ) -> None:
        """Check, on the first instance of each host, that all hosts make the same call.

        Two results are stored in ``_verdict``, an array shared by the instances of the host. The
        first result is whether the calls are equal; the second is the largest ``number`` of all
        hosts. If the calls are equal, ``flat`` is reduced as ``_agree`` describes.
        """
        owners, barrier = self._slice_owners, self._host.barrier
        if owners is None or self._host.position:
            return
        try:
            if flat is None or not same:
                code = plan.code if same else 0
                self._verdict[:] = owners.compare(code, number, plan.signature)
            else:
                self._verdict[:] = self._compare_with_data(owners, plan, number, flat)
        except InstanceLostError as error:
            if owners.lost_instance >= 0 and barrier.lost_error is None:
                self._verdict[:] = 0, _FIRST_LOST + owners.lost_instance
                # After this barrier, the other instances of this host read the lost instance from
                # ``_verdict``, so that their errors name the same instance.
                barrier.wait_for_all(plan.signature)
                barrier.lost_error = error
            raise
        self._verdict[0] &= same

    def _compare_with_data(
        self, owners: MeshGroup, plan: CallPlan, number: int, flat: Array
    ) -> tuple[bool, int]:
        """Check that all hosts make the same call; if so, reduce ``flat`` into ``plan.results``."""
        turn, reduction = self._host.current_turn, plan.reduction
        assert reduction is not None
        out = plan.results[turn][: flat.size]
        total = np.empty(flat.size, reduction.accumulate_dtype) if reduction.is_half else out
        reduction.accumulate((slot[: flat.size] for slot in plan.slots[turn]), total)
        verdict = owners.compare(plan.code, number, plan.signature, total, reduction.op)
        if verdict[0]:
            reduction.finalize(total)
            reduction.narrow(total, out)
        return verdict


_BARRIER = Signature("barrier")
