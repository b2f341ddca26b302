"""Collectives that write their results to arrays of the caller, as torch.distributed needs.

On one host, every instance copies data from slots in shared memory, or directly from the memory of
other processes. With several hosts, the collectives of this module use the methods of ``AllHosts``.

This module itself does not map memory, poll or reduce arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from popdist_py.collectives.arithmetic import Array, dtype_name
from popdist_py.collectives.communicators.interrupted_calls import (
    ends_if_interrupted,
    numeric_errors_last,
)
from popdist_py.collectives.signature import Names, Signature, misfit
from popdist_py.collectives.within_host.host_group import Agreement, CallPlan, HostGroup, exposed

if TYPE_CHECKING:
    from popdist_py.collectives import AnyReduceOp
    from popdist_py.collectives.background import Background
    from popdist_py.collectives.between_hosts.all_hosts import AllHosts
    from popdist_py.collectives.communicators.sliced_all_reduce import SlicedAllReduce
    from popdist_py.collectives.within_host.host_exchange import HostExchange

__all__ = ["GivenArrayCalls"]


class GivenArrayCalls(ABC):
    """The methods of ``GroupCommunicator`` that write results to arrays of the caller.

    All instances must make every call. All arrays are C-contiguous; ``root`` is the index of an
    instance.
    """

    instance_index: int
    num_instances: int
    names: Names
    background: Background
    _host: HostGroup
    _exchange: HostExchange
    _sliced: SlicedAllReduce
    _world: AllHosts | None
    _plans: dict[Any, CallPlan]

    @abstractmethod
    def end_if_interrupted(self, call: str, error: BaseException) -> None:
        """Leave the group if ``error`` has interrupted a call."""

    @abstractmethod
    def _reduce(self, plan: CallPlan, flat: Array) -> None: ...

    @abstractmethod
    def _plan(self, call: str, root: int | None, array: Array, name: str = "") -> CallPlan: ...

    @abstractmethod
    def _plan_of(self, signature: Signature) -> CallPlan: ...

    @abstractmethod
    def _plan_reduction(
        self, key: object, array: Array, op: AnyReduceOp, name: str, call: str = "all_reduce"
    ) -> CallPlan: ...

    @abstractmethod
    def _slots_as(self, dtype: np.dtype[Any], size: int) -> tuple[list[Array], list[Array]]: ...

    @abstractmethod
    def _agree(self, plan: CallPlan, location: int = 0, address: int = 0) -> Agreement: ...

    @ends_if_interrupted
    def all_gather_into(self, array: Array, outputs: Sequence[Array]) -> None:
        """Copy the array of instance i to ``outputs[i]``; the own output may be ``array``."""
        plan = self._plan("all_gather", None, array)
        rows = [output.reshape(-1) for output in outputs]
        if self._world is None:
            self._fill_rows(array, rows, plan)
            return
        self._agree(plan)
        _copy(self._world.all_gather(array, plan.signature), rows)

    @ends_if_interrupted
    def gather_into(self, array: Array, outputs: Sequence[Array], root: int) -> None:
        """On the root, copy ``array`` of each instance i to ``outputs[i]``.

        On all instances except the root, ``outputs`` is empty.
        """
        plan = self._plan("gather", root, array)
        if self._world is None and self._host.is_gathered_one_shot(array.nbytes):
            self._fill_rows(array, [output.reshape(-1) for output in outputs], plan)
            return
        if self._world is None:
            sends = [array[:0]] * self.num_instances
            sends[root] = array
            self._exchange.exchange(_bytes(sends), _bytes(outputs), plan)
            return
        self._agree(plan)
        gathered = self._world.gather(array, root, plan.signature)
        if gathered is not None:
            _copy(gathered, [output.reshape(-1) for output in outputs])

    @ends_if_interrupted
    def scatter_into(self, inputs: Sequence[Array], output: Array, root: int) -> None:
        """Copy ``inputs[i]`` of the root to ``output`` of instance i.

        On all instances except the root, ``inputs`` is empty.
        """
        plan = self._plan("scatter", root, output)
        if self._world is None and output.nbytes <= self._host.slot_bytes // self.num_instances:
            if not plan.slots[0]:
                plan.slots = self._slots_as(output.dtype, output.size * self.num_instances)
            rows = [values.reshape(-1) for values in inputs]
            self._host.scatter_one_shot(plan, rows, output.reshape(-1), root)
            return
        receives = [output[:0]] * self.num_instances
        receives[root] = output
        self._exchange_blocks(_bytes(inputs), _bytes(receives), plan)

    @ends_if_interrupted
    def all_to_all_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Send ``inputs[i]`` to instance i, and receive ``outputs[i]`` from it; sizes may differ.

        Raises:
            CollectiveMismatchError: An output differs in size from the input that is sent to it.
                The instance that receives the input raises the error. If all instances are on one
                host, the instance that sends the input raises the error too. Outputs of matching
                size are filled nevertheless.
        """
        names = sorted({dtype_name(array.dtype) for array in (*inputs, *outputs)})
        plan = self._plan_of(Signature("all_to_all", f"dtype={', '.join(names)}"))
        self._exchange_blocks(_bytes(inputs), _bytes(outputs), plan)

    @ends_if_interrupted
    def reduce_to(self, array: Array, op: AnyReduceOp, root: int) -> None:
        """Reduce ``array`` in place on the root; other instances keep their arrays unchanged."""
        is_root = root == self.instance_index
        plan = self._plan_to_reduce(f"reduce to {root}", array, op)
        flat = array.reshape(-1)
        if plan.one_shot is not None:
            self._host.reduce_one_shot(plan, flat, flat if is_root else None)
            return
        if plan.in_tree_order:
            result = flat.copy()
            self._reduce(plan, result)
            if is_root:
                flat[...] = result
            return
        self._sliced.publish_to_reduce(plan, flat)
        with numeric_errors_last(), exposed(flat):
            agreement = self._agree(plan, address=flat.ctypes.data)
            self._sliced.reduce_private(plan, flat, agreement, root, is_root=is_root)

    @ends_if_interrupted
    def reduce_scatter_into(self, array: Array, output: Array, op: AnyReduceOp) -> None:
        """Reduce ``array`` over all instances; store block i of the result in instance i's output.

        Args:
            array: An array of the shape [instances, elements], with a block for each instance.
            output: An array of the size of one block. ``output`` may be this instance's block of
                ``array``.
            op: The operation.
        """
        plan = self._plan_to_reduce("reduce_scatter", array, op)
        self._reduce_scatter(plan, array, output.reshape(-1))

    def _plan_to_reduce(self, call: str, array: Array, op: AnyReduceOp) -> CallPlan:
        self.background.drain()
        key = (call, op, array.dtype, array.shape, "")
        return self._plans.get(key) or self._plan_reduction(key, array, op, "", call)

    def _reduce_scatter(self, plan: CallPlan, array: Array, out: Array) -> None:
        """Reduce ``array`` over all instances; store this instance's block in ``out``."""
        if self._world is not None or plan.in_tree_order:
            everything = array.reshape(-1).copy()
            self._reduce(plan, everything)
            out[...] = everything[self.instance_index * out.size :][: out.size]
            return
        if plan.one_shot is not None:
            self._host.reduce_one_shot(plan, array.reshape(-1), out)
            return
        blocks = array.reshape(self.num_instances, out.size)
        with numeric_errors_last():
            self._sliced.reduce_scatter_private(plan, blocks, out)

    # --- Calls within a host ------------------------------------------------------------------

    def _fill_rows(self, array: Array, rows: Sequence[Array] | Array, plan: CallPlan) -> None:
        """Copy the array of the instance at position i of this host to the flat ``rows[i]``."""
        flat = array.reshape(-1)
        if self._host.is_gathered_one_shot(array.nbytes):
            if not plan.slots[0]:
                plan.slots = self._slots_as(array.dtype, array.size)
            self._host.gather_one_shot(plan, flat, rows)
        else:
            self._host.gather(flat.view(np.uint8), _bytes(rows), array.nbytes, plan)

    def _exchange_blocks(
        self, sends: Sequence[Array], receives: Sequence[Array], plan: CallPlan
    ) -> None:
        if self._world is None:
            self._exchange.exchange(sends, receives, plan)
            return
        self._agree(plan)
        nothing, me = np.empty(0, np.uint8), self.instance_index
        problem = None
        for receiver in range(self.num_instances):
            block = sends[receiver] if sends else nothing
            rows = self._world.gather_bytes(block, plan.signature, receiver)
            for sender, (row, place) in enumerate(zip(rows or (), receives, strict=False)):
                if row.size == place.size:
                    place[...] = row
                else:
                    problem = misfit(plan.signature, self.names, sender, row.size, me, place.size)
        if problem is not None:
            raise problem


def _bytes(arrays: Sequence[Array] | Array) -> list[Array]:
    return [array.reshape(-1).view(np.uint8) for array in arrays]


def _copy(rows: Sequence[Array] | Array, outputs: Sequence[Array]) -> None:
    for row, output in zip(rows, outputs, strict=True):
        output[...] = row.reshape(-1)
