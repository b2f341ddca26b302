"""The membership of this process in a group, from the first call until the process leaves.

A membership applies the time-out of each call and converts errors to torch's error classes. The
process group makes one call at a time, and closes the membership after the last call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from popdist_py.collectives.communicators.group_communicator import GroupCommunicator
from popdist_py.collectives.communicators.join import join
from popdist_py.collectives.signature import Names
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.environment import CollectiveSettings
from popdist_py.errors import PopdistError
from popdist_py.torch_backend.membership.errors import GroupClosedError, as_torch_error
from popdist_py.torch_backend.membership.group_store import GroupStore
from popdist_py.torch_backend.membership.monitored_barrier import MonitoredBarrier
from popdist_py.torch_backend.membership.store_meeting import StoreMeeting

__all__ = ["Membership"]

_TIME_LIMIT = "the timeout of the group"


class Membership:
    """The membership of this process in one group.

    Args:
        group: The process group. torch.distributed need not know the group before the first call.
        store: The store that torch made for this group.
        settings: The settings for communication. ``hang_timeout`` is the default time-out of every
            call.

    Attributes:
        limits: The time limits for waits in the group's store, collectives, sends and receives.
    """

    def __init__(self, group: dist.ProcessGroup, store: Any, settings: CollectiveSettings) -> None:
        self._group = weakref.ref(group)
        self._settings = settings
        self._pid = os.getpid()
        self._communicator: GroupCommunicator | None = None
        self._closed = ""
        self._failure: PopdistError | None = None
        self.limits = WaitLimits(settings.hang_timeout, self.names)
        self.store = GroupStore(store, group.rank(), group.size(), self.limits)
        self._monitored = MonitoredBarrier(self.store)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the group; False in a child that was forked afterwards."""
        return os.getpid() == self._pid

    @property
    def timeout(self) -> timedelta:
        """The longest time for which a call may wait for another rank."""
        return timedelta(seconds=self.limits.hang_timeout)

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self.limits.hang_timeout = timeout.total_seconds()

    def call(
        self, function: Callable[[GroupCommunicator], None], timeout: timedelta | None = None
    ) -> None:
        """Run a collective call. If an interrupt ends the call midway, leave the group.

        Args:
            function: A function that makes the call with the communicator of the group.
            timeout: The time-out of this call; None means the time-out of the group.

        Raises:
            MismatchError: The ranks make different calls.
            RankLostError: Another rank ended, left the group, or did not make the call in time.
            GroupClosedError: The group was destroyed, or another process made the group.
        """
        try:
            # NumPy's warnings are off, because torch gives no warning when a sum becomes infinite.
            with np.errstate(over="ignore", invalid="ignore"):
                communicator = self._communicator or self._join()
                if self._closes():
                    raise self._closed_error()
                with self.limits.during_call(None if timeout is None else timeout.total_seconds()):
                    function(communicator)
        except PopdistError as error:
            if self._closed:
                raise self._closed_error() from None
            raise as_torch_error(error) from None
        except BaseException as error:
            # An interrupt has ended the call midway, and other ranks may still wait for its data.
            # The other ranks would mistake the data of this rank's next call for data of the
            # interrupted call. Therefore this rank leaves the group.
            self._closed = self._closed or (
                f"{type(error).__name__} interrupted a call of this process group"
            )
            self._leave_communicator()
            raise

    def monitored_barrier(self, timeout: timedelta | float | None, *, wait_all_ranks: bool) -> None:
        """Wait for all ranks; if ranks are missing, raise an error that names them.

        Args:
            timeout: The time limit, as a timedelta or in seconds; None means the time-out of the
                group.
            wait_all_ranks: Whether the error names all missing ranks, or only the first missing
                rank.

        Raises:
            RankLostError: A rank ended or did not reach the barrier in time.
        """
        if self._closes():
            raise self._closed_error()
        limit = self.timeout if timeout is None else timeout
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        try:
            self._monitored.wait(seconds, wait_all_ranks=wait_all_ranks)
        except PopdistError as error:
            if self._closed:
                raise self._closed_error() from None
            raise as_torch_error(error) from None

    def _join(self) -> GroupCommunicator:
        """Connect the ranks.

        If the ranks cannot be connected, each later call of this method raises the same error.
        """
        if self._closes():
            raise self._closed_error()
        if self._failure is not None:
            raise self._failure
        try:
            meeting = StoreMeeting(self.store)
            towards = os.environ.get("MASTER_ADDR")
            communicator = join(meeting, self._settings, towards=towards, limits=self.limits)
        except PopdistError as error:
            self._failure = error
            raise
        self._communicator = communicator
        return communicator

    def _closes(self) -> bool:
        """Tell whether the group is closed, or was made by another process."""
        return bool(self._closed) or not self.is_of_this_process

    def names(self) -> Names:
        """Return the names of the ranks for error messages; the names contain the global ranks."""
        ranks: tuple[int, ...] | None = None
        # These errors mean that torch.distributed does not know the group.
        with suppress(KeyError, ValueError, RuntimeError):
            ranks = tuple(dist.get_process_group_ranks(self._group()))
        return Names("rank", ranks, _TIME_LIMIT)

    def check_process(self) -> None:
        """Raise an error if this process was forked from the process that made the group.

        Raises:
            GroupClosedError: This process was forked from the process that made the group.
        """
        if not self.is_of_this_process:
            raise self._closed_error()

    def _closed_error(self) -> GroupClosedError:
        if not self.is_of_this_process:
            return GroupClosedError(
                f"this process group belongs to process {self._pid}. Process {os.getpid()} was "
                f"forked from process {self._pid} and has to make its own group"
            )
        return GroupClosedError(
            f"{self._closed}: make a new group with init_process_group or new_group"
        )

    def abort(self, reason: str) -> None:
        """Make all running calls of other threads and all later calls fail soon.

        Args:
            reason: The reason for the abort, for error messages.
        """
        if not self.is_of_this_process or self._closed:
            return
        self._closed = reason
        self.limits.abort_reason = reason

    def close(self) -> None:
        """Leave the group. The caller ensures that no collective call is running.

        A second call does nothing. In a forked process, this method does nothing.
        """
        if not self.is_of_this_process:
            return
        self._closed = self._closed or "this process group was destroyed"
        self._leave_communicator()
        self.store.close()

    def _leave_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
