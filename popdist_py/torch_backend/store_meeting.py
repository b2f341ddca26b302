"""How the processes of a group meet: small values in the store of torch.distributed.

Nothing here is called in a training step.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["StoreMeeting"]


class StoreMeeting:
    """The processes of a group; satisfies ``popdist_py.collectives.meeting.Meeting``.

    Args:
        store: torch's, of this group alone; its time-out limits every wait.
        rank: of this process.
        size: number of processes.
        name: of this meeting in the store.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str = "meeting") -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._count = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""
        keys = self._publish(value)
        try:
            texts = self._store.multi_get(keys)
        except (NotImplementedError, RuntimeError):  # a FileStore gets one by one
            texts = [self._store.get(key) for key in keys]
        return [json.loads(text) for text in texts]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        keys = self._publish(value if self.rank == 0 else None)
        return json.loads(self._store.get(keys[0]))

    def split(self, color: int, key: int) -> StoreMeeting:
        """Return the meeting of those that pass the same ``color``, in order of ``key``."""
        pairs = self.all_gather([color, key])
        members = [rank for rank in range(self.size) if pairs[rank][0] == color]
        members.sort(key=lambda rank: pairs[rank][1])
        name = f"{self._name}/{self._count}/{color}"
        return StoreMeeting(self._store, members.index(self.rank), len(members), name)

    def _publish(self, value: Any) -> list[str]:
        """Store the value of this rank, and return the keys of all."""
        self._count += 1
        keys = [f"{self._name}/{self._count}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return keys
