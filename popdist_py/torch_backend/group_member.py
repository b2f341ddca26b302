"""A member of a process group: what torch asks of one, how calls run, and how it is left.

Nothing here knows what a call does.
"""

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

# What an option holds whose time-out is not set is below it.
_NO_TIME = timedelta(0)
# A thread that waits notices within a tenth of a second that it should not.
_SECONDS_AT_EXIT = 2.0
# Without its stubs, where each method has several signatures that differ between versions.
_ProcessGroup: Any = dist.ProcessGroup

never_compiled(MessageWork)


@never_compiled
class GroupMember(_ProcessGroup):  # type: ignore[misc]
    """This process in one group of torch.distributed.

    Args:
        store: torch's, of this group alone.
        rank: of this process in the group.
        size: of the group.
        timeout: of every call.

    Attributes:
        generation: the number of this group among the groups of the same name in this store.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        settings = settings_of_group(os.environ, timeout)
        store, self.generation = own_store(store, rank, size)
        self._membership = Membership(self, store, settings)
        self._queue = CallQueue(lambda: f"process group {self._group_name}".rstrip())
        self._group_name = ""
        self._group_desc = "undefined"
        self._messages = Messages(store, rank, size, settings, self._membership.names)
        self._sequence_number = 0
        _open.add(self)

    def getBackendName(self) -> str:
        """Return the name of the back end."""
        return "popdist"

    name = getBackendName

    # torch keeps these with the back ends of a group, and this one has none but itself.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupMember:
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

    # --- How calls run ------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        call: Callable[[GroupCommunicator], None],
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
_open: weakref.WeakSet[GroupMember] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for group in list(_open):
        group.leave_at_exit()
