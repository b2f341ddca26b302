"""The process group ``popdist``: torch.distributed's calls, made with this library's collectives.

The process group checks the arguments of a call as soon as the program makes the call. The process
group reads the tensors only when the call runs in the queue, because an earlier call may still
write to them. Tensors are sent as flat arrays. So the ranks may pass tensors of different shapes if
the tensors have equal numbers of elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from popdist_py.collectives.communicators.group_communicator import GroupCommunicator
from popdist_py.collectives.signature import Signature
from popdist_py.torch_backend.arguments import (
    ArgumentError,
    blocks,
    check_like,
    check_list,
    check_multiple,
    check_reduced,
    check_root,
    check_single,
    check_tensors,
    check_written,
    row_of_root,
)
from popdist_py.torch_backend.buckets import mover_of
from popdist_py.torch_backend.compilation import never_compiled
from popdist_py.torch_backend.group_member import GroupMember
from popdist_py.torch_backend.operations import SUM, Operation, operation_of
from popdist_py.torch_backend.overloads import also_with_arguments
from popdist_py.torch_backend.sparse_tensors import add_up
from popdist_py.torch_backend.tensors import array_of, write_back

__all__ = ["PopdistProcessGroup"]

_Tensors = list[torch.Tensor]
# DistributedDataParallel's join() starts an all-reduce of one element and passes the work object to
# its C++ reducer. The reducer uses the work object in the backward pass. C++ can call the Python
# methods of a work object only while Python keeps a reference to the object. So each group keeps
# references to the work objects of its latest all-reduces of one element.
_KEPT_WORKS = 8


@never_compiled
class PopdistProcessGroup(GroupMember):
    """The processes of one group of torch.distributed.

    The class has the methods of ``dist.ProcessGroup``. ``opts=None`` means torch's default options.

    Args:
        store: The store that torch made for this group.
        rank: The rank of this process in the group.
        size: The number of ranks.
        timeout: The default time-out of every call.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._kept_works: deque[Any] = deque(maxlen=_KEPT_WORKS)

    # --- Reductions ---------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self._all_reduce_sparse(tensors[0], opts)
        check_tensors("all_reduce", tensors)
        check_reduced("all_reduce", tensors)
        operation = _operation("all_reduce", opts, tensors)
        move = mover_of(tensors)

        def call(comm: GroupCommunicator) -> None:
            _agree_on_number(comm, "all_reduce", tensors)
            for tensor in tensors:
                if operation.factor is not None:
                    tensor.detach().mul_(operation.factor)
                array = array_of(tensor)
                comm.all_reduce(array, operation.name, move=move)
                write_back(array, tensor)
                operation.finish(tensor, self.size())

        work = self._run("all_reduce", call, tensors, opts)
        if len(tensors) == 1 and tensors[0].numel() == 1:
            self._kept_works.append(work)
        return work

    allreduce = also_with_arguments(dist.AllreduceOptions, "op", "timeout")(allreduce_coalesced)

    def _all_reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Any:
        """Add up the sparse tensors of all ranks."""
        if _operation("all_reduce", opts, [tensor]) is not SUM or not tensor.is_cpu:
            raise ArgumentError(
                "all_reduce: sparse tensors are supported only on the CPU and with ReduceOp.SUM. "
                "Call tensor.cpu() or tensor.to_dense() first"
            )

        return self._run("all_reduce", lambda comm: add_up(comm, tensor), [tensor], opts)

    @also_with_arguments(dist.ReduceOptions, "root", "op", "timeout")
    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place at the root."""
        root = _root_of("reduce", opts, self.size())
        check_tensors("reduce", tensors)
        check_single("reduce", "tensor", tensors)
        if root == self.rank():
            check_written("reduce", tensors)
        operation = _operation("reduce", opts, tensors)

        def call(comm: GroupCommunicator) -> None:
            array = array_of(operation.scale(tensors[0]))
            comm.reduce_to(array, operation.name, root)
            if root == self.rank():
                write_back(array, tensors[0])
                operation.finish(tensors[0], self.size())

        return self._run("reduce", call, tensors, opts)

    @also_with_arguments(dist.ReduceScatterOptions, "op", "timeout", tensors=2)
    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Any:
        """Reduce the ranks' tensors ``inputs[0][i]``, and store the result at rank i."""
        check_tensors("reduce_scatter", outputs)
        check_single("reduce_scatter", "output", outputs)
        check_written("reduce_scatter", outputs)
        check_single("reduce_scatter", "input", inputs)
        (row,) = inputs
        check_list("reduce_scatter", "input", row, self.size())
        check_tensors("reduce_scatter", row)
        check_like("reduce_scatter", [row[self.rank()]], outputs[0])
        check_like("reduce_scatter", row, outputs[0], any_size=True)
        operation = _operation("reduce_scatter", opts, outputs)
        is_even = all(tensor.numel() == row[0].numel() for tensor in row)

        def call(comm: GroupCommunicator) -> None:
            arrays = [array_of(operation.scale(tensor)) for tensor in row]
            output = array_of(outputs[0])
            if is_even:
                comm.reduce_scatter_into(np.stack(arrays), output, operation.name)
            else:
                for root, array in enumerate(arrays):
                    own = array.copy()
                    comm.reduce_to(own, operation.name, root)
                    if root == self.rank():
                        output[...] = own
            write_back(output, outputs[0])
            operation.finish(outputs[0], self.size())

        return self._run("reduce_scatter", call, outputs, opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Reduce block i of the ranks' tensors, and store the result in the output of rank i."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> Any:
        """For each output and its input, do the same as ``reduce_scatter_single``."""
        check_tensors("reduce_scatter", [*outputs, *tensors])
        check_written("reduce_scatter", outputs)
        check_list("reduce_scatter", "input", tensors, len(outputs))
        for output, tensor in zip(outputs, tensors, strict=True):
            check_multiple("reduce_scatter", tensor, output, self.size())
        operation = _operation("reduce_scatter", opts, outputs)

        def call(comm: GroupCommunicator) -> None:
            _agree_on_number(comm, "reduce_scatter", tensors)
            for output, tensor in zip(outputs, tensors, strict=True):
                rows = array_of(operation.scale(tensor)).reshape(self.size(), output.numel())
                array = array_of(output)
                comm.reduce_scatter_into(rows, array, operation.name)
                write_back(array, output)
                operation.finish(output, self.size())

        return self._run("reduce_scatter", call, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- Calls without a reduction ------------------------------------------------------------

    @also_with_arguments(dist.BroadcastOptions, "root", "timeout")
    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Overwrite the tensors of all ranks with the tensors of the root."""
        root = _root_of("broadcast", opts, self.size())
        check_tensors("broadcast", tensors)
        if root != self.rank():
            check_written("broadcast", tensors)

        def call(comm: GroupCommunicator) -> None:
            _agree_on_number(comm, "broadcast", tensors)
            for tensor in tensors:
                array = array_of(tensor)
                comm.broadcast(array, root)
                if root != self.rank():
                    write_back(array, tensor)

        return self._run("broadcast", call, tensors, opts)

    @also_with_arguments(AllgatherOptions, "timeout", tensors=2)
    def allgather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None) -> Any:
        """Fill ``outputs[0][i]`` with the tensor of rank i; the tensors may differ in size."""
        check_tensors("all_gather", tensors)
        check_single("all_gather", "input", tensors)
        check_single("all_gather", "output", outputs)
        return self._all_gather_lists(outputs, tensors, opts)

    def allgather_coalesced(
        self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None
    ) -> Any:
        """Fill ``outputs[r][i]`` with tensor i of rank r."""
        check_tensors("all_gather", tensors)
        check_list("all_gather", "output", outputs, self.size())
        for row in outputs:
            check_list("all_gather", "output", row, len(tensors))
        columns = [list(column) for column in zip(*outputs, strict=True)]
        return self._all_gather_lists(columns, tensors, opts)

    def _all_gather_lists(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any) -> Any:
        """Fill ``outputs[i][r]`` with tensor i of rank r."""
        for row, tensor in zip(outputs, tensors, strict=True):
            check_list("all_gather", "output", row, self.size())
            check_tensors("all_gather", row)
            check_written("all_gather", row)
            check_like("all_gather", row, tensor, any_size=True)
            check_like("all_gather", [row[self.rank()]], tensor)

        def call(comm: GroupCommunicator) -> None:
            _agree_on_number(comm, "all_gather", tensors)
            for row, tensor in zip(outputs, tensors, strict=True):
                arrays = [array_of(output) for output in row]
                if all(array.size == arrays[0].size for array in arrays):
                    comm.all_gather_into(array_of(tensor), arrays)
                else:
                    arrays[self.rank()][...] = array_of(tensor)
                    for root, array in enumerate(arrays):
                        comm.broadcast(array, root)
                for array, output in zip(arrays, row, strict=True):
                    write_back(array, output)

        return self._run("all_gather", call, outputs, opts)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Fill block i of the output with the tensor of rank i."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> Any:
        """For each output and its input, do the same as ``all_gather_single``."""
        check_tensors("all_gather", [*outputs, *tensors])
        check_written("all_gather", outputs)
        check_list("all_gather", "input", tensors, len(outputs))
        for output, tensor in zip(outputs, tensors, strict=True):
            check_multiple("all_gather", output, tensor, self.size())

        def call(comm: GroupCommunicator) -> None:
            _agree_on_number(comm, "all_gather", tensors)
            for output, tensor in zip(outputs, tensors, strict=True):
                array = array_of(output)
                rows = array.reshape(self.size(), tensor.numel())
                comm.all_gather_into(array_of(tensor), list(rows))
                write_back(array, output)

        return self._run("all_gather", call, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @also_with_arguments(dist.GatherOptions, "root", "timeout", tensors=2)
    def gather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None) -> Any:
        """Fill output i of the root with the tensor of rank i."""
        root = _root_of("gather", opts, self.size())
        check_tensors("gather", tensors)
        check_single("gather", "input", tensors)
        row = row_of_root(
            "gather", "output", outputs, tensors[0], self.size() if root == self.rank() else 0
        )

        check_written("gather", row)

        def call(comm: GroupCommunicator) -> None:
            arrays = [array_of(output) for output in row]
            comm.gather_into(array_of(tensors[0]), arrays, root)
            for array, output in zip(arrays, row, strict=True):
                write_back(array, output)

        return self._run("gather", call, outputs, opts)

    @also_with_arguments(dist.ScatterOptions, "root", "timeout", tensors=2)
    def scatter(self, outputs: _Tensors, tensors: list[_Tensors], opts: Any = None) -> Any:
        """Fill the output of rank i with tensor i of the root."""
        root = _root_of("scatter", opts, self.size())
        check_tensors("scatter", outputs)
        check_written("scatter", outputs)
        check_single("scatter", "output", outputs)
        row = row_of_root(
            "scatter", "input", tensors, outputs[0], self.size() if root == self.rank() else 0
        )

        def call(comm: GroupCommunicator) -> None:
            array = array_of(outputs[0])
            comm.scatter_into([array_of(tensor) for tensor in row], array, root)
            write_back(array, outputs[0])

        return self._run("scatter", call, outputs, opts)

    def alltoall(self, outputs: _Tensors, tensors: _Tensors, opts: Any = None) -> Any:
        """Fill output i with the tensor that rank i sends to this rank."""
        check_list("all_to_all", "output", outputs, self.size())
        check_list("all_to_all", "input", tensors, self.size())
        check_tensors("all_to_all", [*outputs, *tensors])
        check_written("all_to_all", outputs)
        check_like("all_to_all", [*outputs, *tensors], tensors[0], any_size=True)
        check_like("all_to_all", [outputs[self.rank()]], tensors[self.rank()])

        def call(comm: GroupCommunicator) -> None:
            arrays = [array_of(output) for output in outputs]
            comm.all_to_all_into([array_of(tensor) for tensor in tensors], arrays)
            for array, output in zip(arrays, outputs, strict=True):
                write_back(array, output)

        return self._run("all_to_all", call, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Fill block i of the output with the block that rank i sends to this rank."""
        return self.alltoall(
            blocks("all_to_all_single", output, output_sizes, self.size()),
            blocks("all_to_all_single", tensor, input_sizes, self.size()),
            opts,
        )

    alltoall_base = all_to_all_single

    @also_with_arguments(dist.BarrierOptions, "timeout", tensors=0)
    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._run("barrier", lambda comm: comm.barrier(), [], opts)


def _root_of(call: str, opts: Any, size: int) -> int:
    """Return the root rank that the options name; 0 without options."""
    root: int = opts.rootRank if opts is not None else 0
    check_root(call, root, size)
    return root


def _operation(call: str, opts: Any, tensors: _Tensors) -> Operation:
    """Return the reduction that the options name; the sum without options."""
    return operation_of(call, dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors)


def _agree_on_number(comm: GroupCommunicator, call: str, tensors: _Tensors) -> None:
    """Before tensors are sent, raise an error if the ranks pass different numbers of tensors."""
    if len(tensors) > 1:
        comm.agree(Signature(call, f"{len(tensors)} tensors"))
