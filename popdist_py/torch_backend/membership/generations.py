"""Separate keys for groups that a program makes one after the other in the same store.

If a program makes a group again, torch.distributed gives the new group the name of the old one.
With this name alone, the new and the old group would use the same keys in the store. A store often
exists longer than a group, because torchrun's agent, a late rank or the program may keep the store.
Therefore each rank counts the groups that it has made with each store. This count is equal on all
ranks of a group, and is a part of the group's keys.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from popdist_py.collectives.signature import Names
from popdist_py.torch_backend.membership.errors import store_lost

__all__ = ["own_store"]

# The number of prefixes that torch puts before the keys of the group of all ranks, if torch has
# made the store: the device, the name of the group, and "default_pg".
_PREFIXES_OF_RENDEZVOUS = 3
# Typed as Any because torch's stubs lack PrefixStore and TCPStore.
_c10d: Any = dist
# The store of the newest group that contains all ranks. Rank 0 runs the server of this store. The
# store is kept so that its server still answers ranks that are still in this group or already in
# the next group.
_kept: Any = None


def own_store(store: Any, rank: int, size: int) -> tuple[Any, int]:
    """Return a store that contains only this group's keys, and the number of this group.

    The number counts the groups with the same name in this store.

    Args:
        store: The store that torch gives the group.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.

    Raises:
        StoreLostError: The store does not answer.
    """
    _keep(store)
    # After a restart, the store of torchrun's agent still has the keys that ranks wrote before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Subgroups are counted separately for each group of all ranks, because a subgroup of a new
    # group may have the same name but other ranks.
    of_all = getattr(dist.group.WORLD, "generation", 0)
    store = _c10d.PrefixStore(f"attempt_{attempt}/{of_all}", store)
    try:
        generation = store.add(f"generation/{size}/{rank}", 1)
    except dist.DistError as error:
        raise store_lost(Names("rank").of(rank), error) from None
    return _c10d.PrefixStore(f"{generation}", store), generation


def _keep(store: Any) -> None:
    """Keep the store that torch made for the group of all ranks, until torch makes the next store.

    Stores that the program itself has made are not kept, because the program decides how long they
    exist.
    """
    global _kept
    prefixes = 0
    while isinstance(store, _c10d.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    is_of_all = dist.group.WORLD is None and prefixes == _PREFIXES_OF_RENDEZVOUS
    if is_of_all and isinstance(store, _c10d.TCPStore):
        _kept = store
