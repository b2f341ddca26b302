"""The class ErrorFeedback, which stores compression errors of gradients for the next step.

This module only stores the errors. The compressions compute the errors of a step and add them to
the gradients of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import Array

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The compression errors of one array of gradients, for the parts that this instance reduces.

    Args:
        size: The number of elements of the array.
    """

    def __init__(self, size: int) -> None:
        # np.zeros allocates memory pages only when they are written. An instance writes only the
        # parts that it reduces.
        self._rooms = {kind: np.zeros(size, np.float32) for kind in ("values", "sums")}
        self._parts: dict[str, set[tuple[int, int]]] = {kind: set() for kind in self._rooms}
        self._scale = 1.0

    def values(self, part: slice) -> Array:
        """Return the errors of compressing this host's sum of a part, to be changed in place."""
        return self._room("values", part)

    def sums(self, part: slice) -> Array:
        """Return the errors of compressing the sum over all hosts, to be changed in place.

        Only the host that computes the sum of a segment has errors for the segment.
        """
        return self._room("sums", part)

    def _room(self, kind: str, part: slice) -> Array:
        self._parts[kind].add((part.start, part.stop))
        return self._rooms[kind][part]

    def rescale(self, scale: float) -> None:
        """Convert the stored errors to gradients that are multiplied by ``scale``."""
        if scale == self._scale:
            return
        factor = np.float32(scale / self._scale)
        self._scale = scale
        for kind, parts in self._parts.items():
            for start, stop in parts:
                self._rooms[kind][start:stop] *= factor

    def state(self) -> dict[str, Any]:
        """Return the stored errors and their scale, as tensors and numbers."""
        kept = {
            kind: [
                (start, torch.from_numpy(self._rooms[kind][start:stop].copy()))
                for start, stop in sorted(parts)
            ]
            for kind, parts in self._parts.items()
        }
        return {"scale": self._scale, **kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state` returned."""
        self._scale = state["scale"]
        for kind in self._rooms:
            for start, tensor in state[kind]:
                self._room(kind, slice(start, start + tensor.numel()))[:] = tensor.numpy()
