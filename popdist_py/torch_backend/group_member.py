"""The base class of the process group, with all methods except the collectives."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from popdist_py.collectives.communicators.group_communicator import GroupCommunicator
from popdist_py.torch_backend.arguments import check_written
from popdist_py.torch_backend.compilation import never_compiled
from popdist_py.torch_backend.membership.generations import own_store
from popdist_py.torch_backend.membership.group_settings import settings_of_group
from popdist_py.torch_backend.membership.membership import Membership
from popdist_py.torch_backend.messages.message_work import MessageWork
from popdist_py.torch_backend.messages.messages import Messages
from popdist_py.torch_backend.work import CallQueue, PopdistWork

__all__ = ["GroupMember"]

# torch passes a negative time-out if the program gives none.
_NO_TIME = timedelta(0)
# The time limit for leaving a group when the interpreter exits. Two seconds are enough, because a
# waiting thread notices within a tenth of a second that its group was aborted.
_SECONDS_AT_EXIT = 2.0
# Typed as Any because the signatures in torch's stubs differ between versions.
_ProcessGroup: Any = dist.ProcessGroup

never_compiled(MessageWork)


@never_compiled
class GroupMember(_ProcessGroup):  # type: ignore[misc]
    """This process as a member of one group of torch.distributed.

    Args:
        store: The store that torch made for this group.
        rank: The rank of this process in the group.
        size: The number of ranks.
        timeout: The default time-out of every call.

    Attributes:
        generation: How many groups of this name this rank has made in this store, including this
            one.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        settings = settings_of_group(os.environ, timeout)
        store, self.generation = own_store(store, rank, size)
        self._membership = Membership(self, store, settings)
        self._queue = CallQueue(lambda: f"process group {self._group_name}".rstrip())
        self._group_name = ""
        self._group_desc = "undefined"
        self._messages = Messages(store, rank, size, settings, self._membership.limits)
        self._sequence_number = 0
        _open.add(self)

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return "popdist"

    name = getBackendName

    # A group of torch's own class contains one back end for each device type. A popdist group does
    # not contain a back end, because the group itself is the back end for CPU tensors.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupMember:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                "the back end popdist supports CPU tensors only, not tensors on device "
                f"{device}: call tensor.cpu()"
            )
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of calls that this rank has made.

        torch compares this number with the numbers of the other ranks.
        """
        return self._sequence_number

    # torch reads these attributes before it uses optional features of a back end.
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
        """The program's description of the group."""
        return self._group_desc

    # --- Running calls ------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        call: Callable[[GroupCommunicator], None],
        results: Sequence[Any],
        opts: Any,
    ) -> Any:
        """Make a collective call at once, or in the queue's thread if the call is asynchronous.

        Args:
            name: The name of the call, for error messages and for displays of the job's state.
            call: A function that makes the call.
            results: The tensors that the call fills.
            opts: The options object from torch. If it lacks ``asyncOp``, the call is treated as
                asynchronous, because such versions of torch wait for the returned work themselves.
        """
        timeout = getattr(opts, "timeout", None)
        if timeout is not None and timeout <= _NO_TIME:
            timeout = None
        membership = self._membership
        # Raise an error in a forked process before the queue is used. A lock of the queue that was
        # locked during the fork stays locked in the forked process for ever.
        membership.check_process()
        self._sequence_number += 1
        work = PopdistWork(name, lambda: membership.call(call, timeout), results)
        if getattr(opts, "asyncOp", True):
            self._queue.submit(work)
        else:
            self._queue.run(work)
        return work

    # --- Messages -----------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank."""
        self._membership.check_process()
        return self._messages.send(tensors[0], to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from one rank."""
        self._membership.check_process()
        check_written("recv", tensors[:1])
        return self._messages.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank."""
        self._membership.check_process()
        check_written("recv", tensors[:1])
        return self._messages.receive(tensors[0], None, tag)

    # --- Time-outs and leaving ----------------------------------------------------------------

    def monitored_barrier(
        self,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Wait for all ranks; if ranks are missing, raise an error that names them."""
        self._membership.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of all later calls of this group."""
        self._membership.timeout = timeout

    def abort(self) -> None:
        """Leave the group at once. Running calls and unfinished sends and receives then fail."""
        reason = "this process group was aborted"
        self._membership.abort(reason)
        if self._membership.is_of_this_process:
            self._messages.close(reason, 0.0)
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group after all calls have run. A call ends by its time-out at the latest."""
        self._leave()

    def leave_at_exit(self) -> None:
        """Leave the group within a few seconds, because the interpreter is about to exit.

        The threads of the group must end before the interpreter finalizes.
        """
        self._membership.abort("this process is exiting")
        self._leave(_SECONDS_AT_EXIT)

    def _leave(self, seconds: float = -1) -> None:
        """Wait at most ``seconds`` until no call is running, then leave the group.

        The value -1 for ``seconds`` means no time limit.
        """
        if self._queue.is_inside:
            # A signal handler that has interrupted a call of the group runs this code. The
            # interrupted call fails when the handler returns.
            self._membership.abort("this process group was destroyed")
            return
        if self._membership.is_of_this_process:
            self._messages.close(seconds=seconds)
            self._queue.close(self._membership.close, seconds)
        _open.discard(self)


# The groups that this process has not left yet.
_open: weakref.WeakSet[GroupMember] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for group in list(_open):
        group.leave_at_exit()
