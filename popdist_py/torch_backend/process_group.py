"""The process group ``popdist``: what torch.distributed calls, translated to our collectives.

Nothing here moves data: that is ``calls`` and ``messages``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from popdist_py.collectives.communicators.shared_memory import SharedCommunicator
from popdist_py.torch_backend import calls
from popdist_py.torch_backend.membership import Membership
from popdist_py.torch_backend.tensors import array_of, copy_back, for_writing
from popdist_py.torch_backend.work import CallQueue, PopdistWork

__all__ = ["PopdistProcessGroup"]

_RedOp = dist.ReduceOp.RedOpType
_OPERATIONS = {
    _RedOp.SUM: "sum",
    _RedOp.AVG: "mean",
    _RedOp.PRODUCT: "prod",
    _RedOp.MIN: "min",
    _RedOp.MAX: "max",
}

_Tensors = list[torch.Tensor]
# What an option holds whose time-out is not set is below it.
_NO_TIME = timedelta(0)


class PopdistProcessGroup(dist.ProcessGroup):
    """The processes of one group of torch.distributed.

    Args:
        store: torch's, of this group alone.
        rank: of this process in the group.
        size: of the group.
        timeout: of every call.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._membership = Membership(self, store, _NoLinks(), timeout)
        self._queue = CallQueue()
        self._group_name = ""

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return "popdist"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        """The name that torch.distributed has given the group."""
        return self._group_name

    # --- Collectives --------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        op = _operation(opts.reduceOp)

        def call(comm: SharedCommunicator) -> None:
            for tensor in tensors:
                array, is_copy = for_writing(tensor)
                comm.all_reduce(array, op)  # type: ignore[arg-type]
                if is_copy:
                    copy_back(array, tensor)

        return self._run("all_reduce", call, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Overwrite the tensors with those of the root."""
        opts = opts or dist.BroadcastOptions()

        def call(comm: SharedCommunicator) -> None:
            for tensor in tensors:
                array, is_copy = for_writing(tensor)
                comm.broadcast(array, opts.rootRank)
                if is_copy:
                    copy_back(array, tensor)

        return self._run("broadcast", call, tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks, in place at the root."""
        opts = opts or dist.ReduceOptions()
        op = _operation(opts.reduceOp)

        def call(comm: SharedCommunicator) -> None:
            array, is_copy = for_writing(tensors[0])
            calls.reduce(comm, array, op, opts.rootRank)
            if is_copy and comm.instance_index == opts.rootRank:
                copy_back(array, tensors[0])

        return self._run("reduce", call, tensors, opts)

    def allgather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Fill the outputs with the tensors of all ranks."""

        def call(comm: SharedCommunicator) -> None:
            for row, tensor in zip(outputs, tensors, strict=True):
                self._into(
                    row, lambda arrays, t=tensor: calls.all_gather(comm, array_of(t), arrays)
                )

        return self._run("all_gather", call, outputs, opts)

    def allgather_coalesced(
        self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None
    ) -> dist.Work:
        """Fill ``outputs[rank][i]`` with tensor i of each rank."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], tensors, opts)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Fill the rows of one output with the tensors of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> dist.Work:
        """Fill each output with the tensors of all ranks, one after the other."""

        def call(comm: SharedCommunicator) -> None:
            for output, tensor in zip(outputs, tensors, strict=True):
                rows = list(output.view(-1).chunk(self.size())) if output.numel() else [output]
                self._into(
                    rows, lambda arrays, t=tensor: calls.all_gather(comm, array_of(t), arrays)
                )

        return self._run("all_gather", call, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Fill the outputs of the root with the tensors of all ranks."""
        opts = opts or dist.GatherOptions()
        rows = outputs[0] if outputs else []

        def call(comm: SharedCommunicator) -> None:
            own = array_of(tensors[0])
            self._into(rows, lambda arrays: calls.gather(comm, own, arrays, opts.rootRank))

        return self._run("gather", call, outputs, opts)

    def scatter(self, outputs: _Tensors, tensors: list[_Tensors], opts: Any = None) -> dist.Work:
        """Fill the output of each rank with its tensor of the root."""
        opts = opts or dist.ScatterOptions()
        inputs = tensors[0] if tensors else []

        def call(comm: SharedCommunicator) -> None:
            given = [array_of(tensor) for tensor in inputs]
            self._into(outputs, lambda arrays: calls.scatter(comm, given, arrays[0], opts.rootRank))

        return self._run("scatter", call, outputs, opts)

    def reduce_scatter(
        self, outputs: _Tensors, tensors: list[_Tensors], opts: Any = None
    ) -> dist.Work:
        """Fill the output of rank i with the reduction of tensor i of all ranks."""
        return self.reduce_scatter_single_coalesced(
            outputs, [torch.stack(row) for row in tensors], opts
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Fill the output of rank i with the reduction of block i of all ranks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> dist.Work:
        """Do what ``_reduce_scatter_base`` does with each pair."""
        op = _operation(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)

        def call(comm: SharedCommunicator) -> None:
            for output, tensor in zip(outputs, tensors, strict=True):
                rows = array_of(tensor).reshape(self.size(), -1)
                self._into(
                    [output.view(-1)],
                    lambda arrays, r=rows: calls.reduce_scatter(comm, r, arrays[0], op),
                )

        return self._run("reduce_scatter", call, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: _Tensors, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """Fill output i with what rank i has for this rank."""

        def call(comm: SharedCommunicator) -> None:
            given = [array_of(tensor) for tensor in tensors]
            self._into(outputs, lambda arrays: calls.all_to_all(comm, given, arrays))

        return self._run("all_to_all", call, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Fill the blocks of one output with what each rank has for this rank."""
        return self.alltoall(
            _blocks(output, output_sizes, self.size()),
            _blocks(tensor, input_sizes, self.size()),
            opts,
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._run("barrier", lambda comm: comm.barrier(), [], opts)

    # --- How calls run ------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        call: Callable[[SharedCommunicator], None],
        tensors: Sequence[Any],
        opts: Any,
    ) -> dist.Work:
        """Make a call at once, or in the thread of the group if it is asynchronous."""
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout <= _NO_TIME:
            timeout = None
        work = PopdistWork(name, lambda: self._membership.call(call, timeout), tensors)
        if getattr(opts, "asyncOp", True) or self._queue.is_busy:
            self._queue.submit(work)
        else:
            work.run()
            work.wait()
        return work

    def _into(self, tensors: _Tensors, fill: Callable[[list[Any]], None]) -> None:
        """Let ``fill`` write to arrays, and those to the tensors where they are copies."""
        arrays = [for_writing(tensor) for tensor in tensors]
        fill([array for array, _ in arrays])
        for tensor, (array, is_copy) in zip(tensors, arrays, strict=True):
            if is_copy:
                copy_back(array, tensor)

    # --- The life of the group ----------------------------------------------------------------

    def monitored_barrier(
        self,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Wait for all ranks; the error names those that do not come."""
        self._membership.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of the calls to come."""
        self._membership.timeout = timeout

    def abort(self) -> None:
        """Leave the group at once: calls that run fail."""
        self._membership.abort("this process group was aborted")
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group after the calls that were made; each takes its time-out at most."""
        self._queue.close()
        self._membership.close()


class _NoLinks:
    """Hosts are not connected yet."""

    def all_instances(self, host: Any, hosts: Any) -> Any:
        raise NotImplementedError("a group of several hosts")

    def owners(self, color: int, key: int, owners: Any, grace: float) -> Any:
        raise NotImplementedError("a group of several hosts")


def _operation(op: Any) -> str:
    """Return the name of a reduction."""
    kind = getattr(op, "op", op)
    try:
        return _OPERATIONS[kind]
    except KeyError:
        raise ValueError(f"{op}: not supported") from None


def _blocks(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> _Tensors:
    """Cut the first dimension into blocks, equal ones if no sizes are given."""
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(count))
