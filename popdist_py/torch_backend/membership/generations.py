"""Separate store keys for groups that a program makes one after the other in the same store.

If a program makes a group again, torch.distributed gives the new group the name of the old group.
If keys contained only this name, the new and the old group would use the same keys in the store. A
store often exists longer than a group, because torchrun's agent, a late rank or the program may
keep the store. Therefore each rank counts the groups that it has made with each store. The count is
equal on all ranks of a group, and is a part of the group's keys.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from popdist_py.collectives.signature import Names
from popdist_py.torch_backend.membership.errors import store_lost

__all__ = ["own_store"]

# If torch itself makes the store of the group of all ranks, it puts three prefixes before the keys:
# the device, the name of the group, and "default_pg".
_PREFIXES_OF_RENDEZVOUS = 3
# Typed as Any because torch's stubs lack PrefixStore and TCPStore.
_c10d: Any = dist
# The TCP store that torch made for the newest group of all ranks. Rank 0 runs the server of the
# store. This reference keeps the server running for ranks that are still in this group or already
# in the next group.
_kept: Any = None


def own_store(store: Any, rank: int, size: int) -> tuple[Any, int]:
    """Return a store with only this group's keys, and the generation of this group.

    The generation is the number of groups of this name that this rank has made in the store.

    Args:
        store: The store that torch gives the group.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.

    Raises:
        StoreLostError: The store does not answer.
    """
    _keep(store)
    # After torchrun has restarted the ranks, the store of its agent still has the keys of the
    # previous attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Subgroups are counted separately for each group of all ranks. If a program makes a new group
    # of all ranks, its subgroups may have the names of earlier subgroups but contain other ranks.
    of_all = getattr(dist.group.WORLD, "generation", 0)
    store = _c10d.PrefixStore(f"attempt_{attempt}/{of_all}", store)
    try:
        generation = store.add(f"generation/{size}/{rank}", 1)
    except dist.DistError as error:
        raise store_lost(Names("rank").of(rank), error) from None
    return _c10d.PrefixStore(f"{generation}", store), generation


def _keep(store: Any) -> None:
    """Keep a reference to the store of the group of all ranks, if torch itself made the store.

    A later store of this kind replaces the reference. This module keeps no reference to a store
    that the program has made, because the program decides how long that store exists.
    """
    global _kept
    prefixes = 0
    while isinstance(store, _c10d.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    is_of_all = dist.group.WORLD is None and prefixes == _PREFIXES_OF_RENDEZVOUS
    if is_of_all and isinstance(store, _c10d.TCPStore):
        _kept = store
