"""The process group ``popdist``: what torch.distributed calls, translated to our collectives.

A call is checked when it is made; its arrays are taken when it runs, for a call before may still
write to them. Arrays travel flat: ranks may give one number of elements different shapes.

Nothing here moves data: that do the communicator and ``messages``.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from popdist_py.collectives.communicators.shared_memory import SharedCommunicator
from popdist_py.collectives.signature import Signature
from popdist_py.torch_backend.arguments import (
    ArgumentError,
    blocks,
    check_like,
    check_list,
    check_multiple,
    check_root,
    check_single,
    check_tensors,
    row_of_root,
)
from popdist_py.torch_backend.buckets import mover_of
from popdist_py.torch_backend.compilation import never_compiled
from popdist_py.torch_backend.membership.group_settings import settings_of_group
from popdist_py.torch_backend.membership.membership import Membership
from popdist_py.torch_backend.messages.message_work import MessageWork
from popdist_py.torch_backend.messages.messages import Messages
from popdist_py.torch_backend.operations import SUM, Operation, operation_of
from popdist_py.torch_backend.overloads import also_with_arguments
from popdist_py.torch_backend.sparse_tensors import add_up
from popdist_py.torch_backend.tensors import array_of, write_back
from popdist_py.torch_backend.work import CallQueue, PopdistWork

__all__ = ["PopdistProcessGroup"]

_Tensors = list[torch.Tensor]
# DistributedDataParallel's join hands the work of an all-reduce of one element to its reducer, in
# C++, which asks it in backward: it finds our methods only while Python keeps the object.
_KEPT_WORKS = 8
# What an option holds whose time-out is not set is below it.
_NO_TIME = timedelta(0)
# A thread that waits notices within a tenth of a second that it should not.
_SECONDS_AT_EXIT = 2.0
# Without its stubs, where each method has several signatures that differ between versions.
_ProcessGroup: Any = dist.ProcessGroup

never_compiled(MessageWork)


@never_compiled
class PopdistProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The processes of one group of torch.distributed.

    Its methods are those of ``dist.ProcessGroup``; ``opts`` are torch's, or None for the defaults.

    Args:
        store: torch's, of this group alone.
        rank: of this process in the group.
        size: of the group.
        timeout: of every call.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        settings = settings_of_group(os.environ, timeout)
        # The elastic agent keeps its store, with what the ranks said before they were restarted.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]
        self._membership = Membership(self, store, settings)
        self._queue = CallQueue(lambda: f"process group {self._group_name}".rstrip())
        self._group_name = ""
        self._group_desc = "undefined"
        self._messages = Messages(store, rank, size, settings, self._membership.names)
        self._sequence_number = 0
        self._kept_works: deque[Any] = deque(maxlen=_KEPT_WORKS)
        _open.add(self)

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return "popdist"

    name = getBackendName

    # torch keeps these with the back ends of a group, and this one has none but itself.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PopdistProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"the back end popdist is for CPU tensors, not for those on {device}"
            )
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls this rank has made, which torch's own checks compare."""
        return self._sequence_number

    # What torch asks a back end before it uses what only some have.
    supports_splitting = supports_coalescing = False

    def _has_hooks(self) -> bool:
        return False

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def group_name(self) -> str:
        """The name of the group, the same on all its ranks."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._group_desc

    # --- Reductions ---------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self._all_reduce_sparse(tensors[0], opts)
        check_tensors("all_reduce", tensors)
        operation = _operation("all_reduce", opts, tensors)
        move = mover_of(tensors)

        def call(comm: SharedCommunicator) -> None:
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
        """Add up sparse tensors, of which each rank has other elements."""
        if _operation("all_reduce", opts, [tensor]) is not SUM or not tensor.is_cpu:
            raise ArgumentError(
                "all_reduce: a sparse tensor: expected one of the CPU, and ReduceOp.SUM"
            )

        return self._run("all_reduce", lambda comm: add_up(comm, tensor), [tensor], opts)

    @also_with_arguments(dist.ReduceOptions, "root", "op", "timeout")
    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place at the root."""
        root = self._root("reduce", opts)
        check_tensors("reduce", tensors)
        check_single("reduce", "tensor", tensors)
        operation = _operation("reduce", opts, tensors)

        def call(comm: SharedCommunicator) -> None:
            array = array_of(operation.scale(tensors[0]))
            comm.reduce_to(array, operation.name, root)
            if root == self.rank():
                write_back(array, tensors[0])
                operation.finish(tensors[0], self.size())

        return self._run("reduce", call, tensors, opts)

    @also_with_arguments(dist.ReduceScatterOptions, "op", "timeout", tensors=2)
    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Any:
        """Fill the output of rank i with the reduction of tensor i of all ranks."""
        check_tensors("reduce_scatter", outputs)
        check_single("reduce_scatter", "output", outputs)
        check_single("reduce_scatter", "input", inputs)
        (row,) = inputs
        check_list("reduce_scatter", "input", row, self.size())
        check_tensors("reduce_scatter", row)
        check_like("reduce_scatter", [row[self.rank()]], outputs[0])
        check_like("reduce_scatter", row, outputs[0], any_size=True)
        operation = _operation("reduce_scatter", opts, outputs)
        is_even = all(tensor.numel() == row[0].numel() for tensor in row)

        def call(comm: SharedCommunicator) -> None:
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
        """Fill the output of rank i with the reduction of block i of all ranks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> Any:
        """Do what ``reduce_scatter_single`` does with each pair."""
        check_tensors("reduce_scatter", [*outputs, *tensors])
        check_list("reduce_scatter", "input", tensors, len(outputs))
        for output, tensor in zip(outputs, tensors, strict=True):
            check_multiple("reduce_scatter", tensor, output, self.size())
        operation = _operation("reduce_scatter", opts, outputs)

        def call(comm: SharedCommunicator) -> None:
            _agree_on_number(comm, "reduce_scatter", tensors)
            for output, tensor in zip(outputs, tensors, strict=True):
                rows = array_of(operation.scale(tensor)).reshape(self.size(), output.numel())
                array = array_of(output)
                comm.reduce_scatter_into(rows, array, operation.name)
                write_back(array, output)
                operation.finish(output, self.size())

        return self._run("reduce_scatter", call, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- Calls that move values ---------------------------------------------------------------

    @also_with_arguments(dist.BroadcastOptions, "root", "timeout")
    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Overwrite the tensors with those of the root."""
        root = self._root("broadcast", opts)
        check_tensors("broadcast", tensors)

        def call(comm: SharedCommunicator) -> None:
            _agree_on_number(comm, "broadcast", tensors)
            for tensor in tensors:
                array = array_of(tensor)
                comm.broadcast(array, root)
                if root != self.rank():
                    write_back(array, tensor)

        return self._run("broadcast", call, tensors, opts)

    @also_with_arguments(AllgatherOptions, "timeout", tensors=2)
    def allgather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None) -> Any:
        """Fill tensor i of the outputs with the tensor of rank i; ranks may differ in size."""
        check_tensors("all_gather", tensors)
        check_single("all_gather", "input", tensors)
        check_single("all_gather", "output", outputs)
        return self._all_gather_lists(outputs, tensors, opts)

    def allgather_coalesced(
        self, outputs: list[_Tensors], tensors: _Tensors, opts: Any = None
    ) -> Any:
        """Fill ``outputs[rank][i]`` with tensor i of each rank."""
        check_tensors("all_gather", tensors)
        check_list("all_gather", "output", outputs, self.size())
        for row in outputs:
            check_list("all_gather", "output", row, len(tensors))
        columns = [list(column) for column in zip(*outputs, strict=True)]
        return self._all_gather_lists(columns, tensors, opts)

    def _all_gather_lists(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any) -> Any:
        """Fill ``outputs[i][rank]`` with tensor i of each rank."""
        for row, tensor in zip(outputs, tensors, strict=True):
            check_list("all_gather", "output", row, self.size())
            check_tensors("all_gather", row)
            check_like("all_gather", row, tensor, any_size=True)
            check_like("all_gather", [row[self.rank()]], tensor)

        def call(comm: SharedCommunicator) -> None:
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
        """Fill the blocks of one output with the tensors of all ranks."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any = None
    ) -> Any:
        """Do what ``all_gather_single`` does with each pair."""
        check_tensors("all_gather", [*outputs, *tensors])
        check_list("all_gather", "input", tensors, len(outputs))
        for output, tensor in zip(outputs, tensors, strict=True):
            check_multiple("all_gather", output, tensor, self.size())

        def call(comm: SharedCommunicator) -> None:
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
        """Fill tensor i of the outputs of the root with the tensor of rank i."""
        root = self._root("gather", opts)
        check_tensors("gather", tensors)
        check_single("gather", "input", tensors)
        row = row_of_root(
            "gather", "output", outputs, tensors[0], self.size() if root == self.rank() else 0
        )

        def call(comm: SharedCommunicator) -> None:
            arrays = [array_of(output) for output in row]
            comm.gather_into(array_of(tensors[0]), arrays, root)
            for array, output in zip(arrays, row, strict=True):
                write_back(array, output)

        return self._run("gather", call, outputs, opts)

    @also_with_arguments(dist.ScatterOptions, "root", "timeout", tensors=2)
    def scatter(self, outputs: _Tensors, tensors: list[_Tensors], opts: Any = None) -> Any:
        """Fill the output of rank i with tensor i of the root."""
        root = self._root("scatter", opts)
        check_tensors("scatter", outputs)
        check_single("scatter", "output", outputs)
        row = row_of_root(
            "scatter", "input", tensors, outputs[0], self.size() if root == self.rank() else 0
        )

        def call(comm: SharedCommunicator) -> None:
            array = array_of(outputs[0])
            comm.scatter_into([array_of(tensor) for tensor in row], array, root)
            write_back(array, outputs[0])

        return self._run("scatter", call, outputs, opts)

    def alltoall(self, outputs: _Tensors, tensors: _Tensors, opts: Any = None) -> Any:
        """Fill output i with what rank i has for this rank."""
        check_list("all_to_all", "output", outputs, self.size())
        check_list("all_to_all", "input", tensors, self.size())
        check_tensors("all_to_all", [*outputs, *tensors])
        check_like("all_to_all", [*outputs, *tensors], tensors[0], any_size=True)
        check_like("all_to_all", [outputs[self.rank()]], tensors[self.rank()])

        def call(comm: SharedCommunicator) -> None:
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
        """Fill the blocks of one output with what each rank has for this rank."""
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

    # --- Messages -----------------------------------------------------------------------------

    def send(self, tensors: _Tensors, to: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank."""
        self._membership.check_process()
        return self._messages.send(tensors[0], to, tag)

    def recv(self, tensors: _Tensors, source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from one rank."""
        self._membership.check_process()
        return self._messages.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank."""
        self._membership.check_process()
        return self._messages.receive(tensors[0], None, tag)

    # --- How calls run ------------------------------------------------------------------------

    def _root(self, call: str, opts: Any) -> int:
        """Return the root that the options name."""
        root: int = opts.rootRank if opts is not None else 0
        check_root(call, root, self.size())
        return root

    def _run(
        self,
        name: str,
        call: Callable[[SharedCommunicator], None],
        results: Sequence[Any],
        opts: Any,
    ) -> Any:
        """Make a call at once, or in the thread of the group if it is asynchronous.

        Args:
            name: of the call, for messages and views.
            call: what it does.
            results: the tensors that it fills.
            opts: torch's; a version that does not say ``asyncOp`` there waits for every work.
        """
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout <= _NO_TIME:
            timeout = None
        membership = self._membership
        membership.check_process()  # a lock that another thread held stays locked in a fork
        self._sequence_number += 1
        work = PopdistWork(name, lambda: membership.call(call, timeout), results)
        if getattr(opts, "asyncOp", True):
            self._queue.submit(work)
        else:
            self._queue.run(work)
        return work

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
        self._messages.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Leave the group at once: calls that run, and messages that are under way, fail."""
        reason = "this process group was aborted"
        self._membership.abort(reason)
        if self._membership.is_of_this_process:
            self._messages.close(reason, 0.0)
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group after the calls that were made; each takes its time-out at most."""
        self._leave()

    def leave_at_exit(self) -> None:
        """Leave the group soon: no thread may run while the interpreter ends."""
        self._membership.abort("this process ends")
        self._leave(_SECONDS_AT_EXIT)

    def _leave(self, seconds: float = -1) -> None:
        """Leave the group, once no call runs, or after ``seconds``; a forked process is in none."""
        if self._queue.is_inside:
            # In a signal handler: the call that it has interrupted fails when it returns.
            self._membership.abort("this process group was destroyed")
            return
        if self._membership.is_of_this_process:
            self._messages.close(seconds=seconds)
            self._queue.close(self._membership.close, seconds)
        _open.discard(self)


# The groups that this process has not left.
_open: weakref.WeakSet[PopdistProcessGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for group in list(_open):
        group.leave_at_exit()


def _operation(call: str, opts: Any, tensors: _Tensors) -> Operation:
    """Return the reduction that the options name."""
    return operation_of(call, dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors)


def _agree_on_number(comm: SharedCommunicator, call: str, tensors: _Tensors) -> None:
    """Let ranks that pass different numbers of tensors find out before they exchange the first."""
    if len(tensors) > 1:
        comm.agree(Signature(call, f"{len(tensors)} tensors"))
