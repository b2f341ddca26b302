"""Separate keys for groups that a program makes one after the other in the same store.

torch.distributed gives a group that is made again the name of its predecessor, and so the same
keys. A store often outlives a group, because torchrun's agent, a late rank or the program may keep
the store. Therefore each rank counts, in each store, the groups that it has made with that store.
The count, which is equal on all ranks of a group, is a part of the group's keys.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from popdist_py.collectives.signature import Names
from popdist_py.torch_backend.membership.errors import store_lost

__all__ = ["own_store"]

# The prefixes that torch puts before the keys of the group of all if it has made the store itself:
# the device, the name of the group, and "default_pg".
_PREFIXES_OF_RENDEZVOUS = 3
# Typed as Any because torch's stubs lack PrefixStore and TCPStore.
_c10d: Any = dist
# The store of the newest group of all ranks. It is kept because its server, in rank 0, still serves
# ranks that are late in this group or early in the next group.
_kept: Any = None


def own_store(store: Any, rank: int, size: int) -> tuple[Any, int]:
    """Return a store with keys of this group only, and the group's number among its namesakes.

    Args:
        store: The store that torch gives the group.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.

    Raises:
        StoreLostError: The store does not answer.
    """
    _keep(store)
    # The store of the elastic agent still has the keys that ranks wrote before a restart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A new group of all ranks may have other ranks in its subgroup of the same name.
    of_all = getattr(dist.group.WORLD, "generation", 0)
    store = _c10d.PrefixStore(f"attempt_{attempt}/{of_all}", store)
    try:
        generation = store.add(f"generation/{size}/{rank}", 1)
    except dist.DistError as error:
        raise store_lost(Names("rank").of(rank), error) from None
    return _c10d.PrefixStore(f"{generation}", store), generation


def _keep(store: Any) -> None:
    """Keep the store that torch made for the group of all ranks, until torch makes the next one.

    This function ignores stores that the program has made, because the program decides how long
    they live.
    """
    global _kept
    prefixes = 0
    while isinstance(store, _c10d.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    is_of_all = dist.group.WORLD is None and prefixes == _PREFIXES_OF_RENDEZVOUS
    if is_of_all and isinstance(store, _c10d.TCPStore):
        _kept = store
