"""The exchange of small values over the store of torch.distributed, while the ranks join a group.

The ranks use this module only at the first call of a group, and not in later training steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from popdist_py.torch_backend.membership.group_store import GroupStore

__all__ = ["StoreMeeting"]

_CALL = "the first call of the group"


class StoreMeeting:
    """Some or all ranks of a group, which exchange small values over the group's store.

    The class implements the protocol ``popdist_py.collectives.Meeting``.

    Args:
        store: The store of the group. Each wait ends at the time-out of the group.
        members: The ranks that exchange values; None for all ranks of the group.
        name: The prefix of all keys that this object uses in the store.
    """

    def __init__(
        self, store: GroupStore, members: Sequence[int] | None = None, name: str = "meeting"
    ) -> None:
        self._members = range(store.size) if members is None else members
        self.rank = self._members.index(store.rank)
        self.size = len(self._members)
        self._store = store
        self._name = name
        self._count = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values that the ranks passed, in the order of the ranks."""
        keys = self._publish(value)
        return self._store.take(keys, _CALL)

    def broadcast(self, value: Any) -> Any:
        """Return the value that rank 0 passed."""
        keys = self._publish(value if self.rank == 0 else None)
        root = self._members[0]
        return self._store.take({root: keys[root]}, _CALL)[0]

    def split(self, color: int, key: int) -> StoreMeeting:
        """Return a StoreMeeting of the ranks that pass the same ``color``, in order of ``key``."""
        pairs = self.all_gather([color, key])
        places = [place for place in range(self.size) if pairs[place][0] == color]
        places.sort(key=lambda place: pairs[place][1])
        members = [self._members[place] for place in places]
        return StoreMeeting(self._store, members, f"{self._name}/{self._count}/{color}")

    def _publish(self, value: Any) -> dict[int, str]:
        """Publish this rank's value in the store; return the store key of each rank's value."""
        self._count += 1
        keys = {rank: f"{self._name}/{self._count}/{rank}" for rank in self._members}
        self._store.put(keys[self._store.rank], value)
        return keys
