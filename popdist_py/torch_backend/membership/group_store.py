"""The key-value store of a group. A wait for the value of a rank fails if that rank has ended.

Every rank publishes its process id when it makes the group. This module polls torch's store instead
of calling the blocking wait of torch's store. torch's store serves one thread at a time. So a
blocking wait would prevent other threads of this process from publishing values that other ranks
wait for.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from popdist_py.collectives.communicators.join import place_of_this_process
from popdist_py.collectives.signature import Names
from popdist_py.collectives.waiting import WaitLimits, WaitTime
from popdist_py.torch_backend.membership.errors import (
    RankLostError,
    StoreLostError,
    as_torch_error,
    store_lost,
)

__all__ = ["GroupStore"]

# The shortest and the longest pause between two polls of the store, in seconds. The pauses become
# longer during a wait, because fast polling keeps a core busy.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.2e-3, 20e-3
# If a rank publishes a value and then ends, the value arrives within this number of seconds.
_GRACE_SECONDS = 1.0


class GroupStore:
    """The key-value store of one group.

    Args:
        store: The store that torch made for this group.
        rank: The rank of this process in the group.
        size: The number of ranks.
        limits: The time limits for all waits of the group, and the names of its ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, limits: WaitLimits) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._limits = limits
        self._watched: dict[int, _Process] = {}
        self.put(f"process/{rank}", [os.getpid(), place_of_this_process()])

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value under ``key``, so that the other ranks can read it."""
        try:
            self._store.set(key, json.dumps(value))
        except dist.DistError as error:
            raise self._lost_store(error) from None

    @property
    def names(self) -> Names:
        """The names of the ranks for error messages."""
        return self._limits.names

    def take(self, keys: Mapping[int, str], call: object) -> list[Any]:
        """Wait until the ranks have published the values of ``keys``, and return these values.

        Args:
            keys: For each rank that publishes a value, the key of this value.
            call: The name of the call that waits, for error messages.

        Raises:
            RankLostError: A rank has ended, or did not publish its value in time.
            StoreLostError: The key-value store does not answer.
            InstanceLostError: Another thread has aborted the group.
        """
        missing = self.wait(keys, call)
        if missing:
            raise as_torch_error(self._limits.late_error(missing, call))
        try:
            return [json.loads(self._store.get(key)) for key in keys.values()]
        except dist.DistError as error:
            raise self._lost_store(error) from None

    def wait(
        self, keys: Mapping[int, str], call: object, seconds: float | None = None
    ) -> list[int]:
        """Wait until all keys have values; at the time limit, return the ranks without a value.

        Args:
            keys: For each rank that publishes a value, the key of this value.
            call: The name of the call that waits, for error messages.
            seconds: The longest time to wait; None means the time-out of the group.

        Raises:
            RankLostError: A rank has ended without publishing its value.
            StoreLostError: The key-value store does not answer.
            InstanceLostError: Another thread has aborted the group.
        """
        limits = self._limits
        missing = dict(keys)
        wait, pause, looked_at = WaitTime(), _SHORTEST_PAUSE, time.monotonic()
        while missing:
            if self._has(*missing.values()):
                return []
            limits.check_abort(call)
            if (now := time.monotonic()) - looked_at > _LONGEST_PAUSE * 5:
                looked_at = now
                missing = {rank: key for rank, key in missing.items() if not self._has(key)}
                self._check_processes(missing, call)
            # All ranks have the same time limit here, because every rank sees in the store which
            # keys are missing. ``WaitLimits.seconds`` is not used: its longer limits are for ranks
            # that learn from other ranks which rank is missing. The ranks may not be connected yet.
            # Therefore only this time limit finds a host that does not answer.
            if wait.seconds() > (limits.hang_timeout if seconds is None else seconds):
                return [rank for rank, key in missing.items() if not self._has(key)]
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return []

    def close(self) -> None:
        """Stop watching the processes of the other ranks."""
        while self._watched:
            self._watched.popitem()[1].close()

    def _has(self, *keys: str) -> bool:
        try:
            return bool(self._store.check(list(keys)))
        except dist.DistError as error:
            raise self._lost_store(error) from None

    def _check_processes(self, keys: Mapping[int, str], call: object) -> None:
        """Raise an error if a rank on this host has ended without publishing its value."""
        ended = [rank for rank in keys if self._process(rank).has_ended()]
        for rank in ended:
            if not self._has(keys[rank]):
                process = f"(process {self._process(rank).pid})"
                raise RankLostError(f"{call}: {self.names.of(rank)} {process} ended")

    def _process(self, rank: int) -> _Process:
        """Return the process of a rank; its pid is 0 if this process cannot observe its end."""
        known = self._watched.get(rank)
        if known is not None:
            return known
        key = f"process/{rank}"
        if not self._has(key):
            return _Process(0)
        pid, place = json.loads(self._store.get(key))
        is_here = bool(place) and place == place_of_this_process()
        self._watched[rank] = _Process(pid if is_here else 0)
        return self._watched[rank]

    def _lost_store(self, error: Exception) -> StoreLostError:
        return store_lost(self.names.of(self.rank), error)


class _Process:
    """A process on this host. The pid 0 means that the end of the process cannot be observed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended_at: float | None = None
        self._pidfd = -1
        if pid:
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended_at = time.monotonic()
            except OSError:  # without pidfd, a wait for the process ends at its time-out
                pass

    def has_ended(self) -> bool:
        """Tell whether the process ended so long ago that all values it published have arrived."""
        if self._ended_at is None and self._pidfd >= 0:
            ended = select.poll()  # select() does not accept descriptors above 1023
            ended.register(self._pidfd, select.POLLIN)
            if ended.poll(0):
                self._ended_at = time.monotonic()
        return self._ended_at is not None and time.monotonic() - self._ended_at > _GRACE_SECONDS

    def close(self) -> None:
        """Stop watching the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
