"""The class ErrorFeedback, which stores compression errors of gradients for the next step.

The module ``error_feedback`` only stores the compression errors. The modules ``power_sgd`` and
``rounded_sums`` compute the compression errors of a training step, and add the errors to the
gradients of the next training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import Array

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The compression errors of one array of gradients, for the slices that this instance reduces.

    Args:
        size: The number of elements of the array of gradients.
    """

    def __init__(self, size: int) -> None:
        # The error arrays take little memory, because np.zeros allocates a memory page only when
        # the page is written. An instance writes only those slices of the error arrays whose
        # gradients the instance reduces.
        self._rooms = {kind: np.zeros(size, np.float32) for kind in ("values", "sums")}
        self._parts: dict[str, set[tuple[int, int]]] = {kind: set() for kind in self._rooms}
        self._scale = 1.0

    def values(self, part: slice) -> Array:
        """Return the compression errors of this host's gradient sum, which may be changed."""
        return self._room("values", part)

    def sums(self, part: slice) -> Array:
        """Return the compression errors of all hosts' gradient sum, which may be changed in place.

        A host stores the compression errors of all hosts' gradient sum only for the segment of the
        array that the host adds up.
        """
        return self._room("sums", part)

    def _room(self, kind: str, part: slice) -> Array:
        self._parts[kind].add((part.start, part.stop))
        return self._rooms[kind][part]

    def rescale(self, scale: float) -> None:
        """Adapt the stored errors to a new loss scale, the factor that multiplies the gradients."""
        if scale == self._scale:
            return
        factor = np.float32(scale / self._scale)
        self._scale = scale
        for kind, parts in self._parts.items():
            for start, stop in parts:
                self._rooms[kind][start:stop] *= factor

    def state(self) -> dict[str, Any]:
        """Return the stored compression errors and their loss scale, as tensors and numbers."""
        kept = {
            kind: [
                (start, torch.from_numpy(self._rooms[kind][start:stop].copy()))
                for start, stop in sorted(parts)
            ]
            for kind, parts in self._parts.items()
        }
        return {"scale": self._scale, **kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the compression errors and the loss scale that :meth:`state` returned."""
        self._scale = state["scale"]
        for kind in self._rooms:
            for start, tensor in state[kind]:
                self._room(kind, slice(start, start + tensor.numel()))[:] = tensor.numpy()
