"""Keys of their own for each of the groups that a program makes, one after the other, in one store.

torch.distributed gives a group that is made again the name of the one before, and so its keys. A
store often lives on: that of torchrun's agent, that of a rank which is later than the others, and
those for which the program has a reference. So each rank counts in the store the groups that it
has made there, and a group uses the keys of its number, which is equal on all of its ranks.

Nothing here knows what the keys are for.
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
# Without torch's stubs, which do not name these.
_c10d: Any = dist
# The store in which the group of all was made last. Its server, in rank 0, serves the ranks that
# are late in this group and those that are early in the next one.
_kept: Any = None


def own_store(store: Any, rank: int, size: int) -> tuple[Any, int]:
    """Return the store of one group alone, and the number of this group among those of its name.

    Args:
        store: that torch gives the group.
        rank: of this process in the group.
        size: of the group.

    Raises:
        StoreLostError: the store does not answer.
    """
    _keep(store)
    # The elastic agent keeps its store, with what the ranks said before they were restarted.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Other ranks may form the group of one name once the group of all is another one.
    of_all = getattr(dist.group.WORLD, "generation", 0)
    store = _c10d.PrefixStore(f"attempt_{attempt}/{of_all}", store)
    try:
        generation = store.add(f"generation/{size}/{rank}", 1)
    except dist.DistError as error:
        raise store_lost(Names("rank").of(rank), error) from None
    return _c10d.PrefixStore(f"{generation}", store), generation


def _keep(store: Any) -> None:
    """Keep the server of a store that torch has made for the group of all, until the next one.

    A store that the program has made itself is the program's to keep or to end.
    """
    global _kept
    prefixes = 0
    while isinstance(store, _c10d.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    is_of_all = dist.group.WORLD is None and prefixes == _PREFIXES_OF_RENDEZVOUS
    if is_of_all and isinstance(store, _c10d.TCPStore):
        _kept = store
