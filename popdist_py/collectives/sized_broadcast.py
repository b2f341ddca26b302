"""Bytes whose number only the sender knows, over a broadcast of equally large arrays.

Nothing here sends anything itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from popdist_py.collectives.arithmetic import Array

__all__ = ["sized_broadcast"]


def sized_broadcast(broadcast: Callable[[Array], None], data: Array, *, is_root: bool) -> Array:
    """Return the bytes ``data`` of the root; what the others pass does not matter.

    Args:
        broadcast: overwrites flat bytes, of the same number everywhere, with those of the root.
        data: uint8 [n].
        is_root: whether this is the root.
    """
    size = np.array([data.size])
    broadcast(size.view(np.uint8))
    received = data.copy() if is_root else np.empty(size[0], np.uint8)
    broadcast(received)
    return received
