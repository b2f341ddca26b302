"""Error feedback: what a step's compressed gradients leave out, kept for the next step.

Memory and its state; what is left out, and when it is added, is the compressions' matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import Array

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """What was left out of the gradients of one array, of the parts that this instance owns.

    Args:
        size: number of elements of the array.
    """

    def __init__(self, size: int) -> None:
        # Zeros take no memory where nobody writes: an instance touches what it owns.
        self._rooms = {kind: np.zeros(size, np.float32) for kind in ("values", "sums")}
        self._parts: dict[str, set[tuple[int, int]]] = {kind: set() for kind in self._rooms}
        self._scale = 1.0

    def values(self, part: slice) -> Array:
        """Return what this host's own sum of a part left out, to be changed in place."""
        return self._room("values", part)

    def sums(self, part: slice) -> Array:
        """Return what the sum over all hosts left out, where this host made it."""
        return self._room("sums", part)

    def _room(self, kind: str, part: slice) -> Array:
        self._parts[kind].add((part.start, part.stop))
        return self._rooms[kind][part]

    def rescale(self, scale: float) -> None:
        """Take note that gradients from now on are multiplied by ``scale``."""
        if scale == self._scale:
            return
        factor = np.float32(scale / self._scale)
        self._scale = scale
        for kind, parts in self._parts.items():
            for start, stop in parts:
                self._rooms[kind][start:stop] *= factor

    def state(self) -> dict[str, Any]:
        """Return all of it, as tensors and numbers."""
        kept = {
            kind: [
                (start, torch.from_numpy(self._rooms[kind][start:stop].copy()))
                for start, stop in sorted(parts)
            ]
            for kind, parts in self._parts.items()
        }
        return {"scale": self._scale, **kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned."""
        self._scale = state["scale"]
        for kind in self._rooms:
            for start, tensor in state[kind]:
                self._room(kind, slice(start, start + tensor.numel()))[:] = tensor.numpy()
