"""Automatic loss scaling: the factor on the loss that keeps half gradients in range.

The rule is PopART's: after every update the scale is halved if too many elements of the gradients
are near half's largest value, and doubled otherwise. As torch.amp.GradScaler, the scaler looks at
gradients and adapts a factor; reducing and updating is ``training.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.poptorch.update.gradients import Gradients

__all__ = ["AutomaticLossScaling"]

# The largest power of two that half holds; scales stay between it and its inverse.
_LARGEST: Final = 2.0**15


class AutomaticLossScaling:
    """Adapts a factor on the optimiser's own ``loss_scaling``, equal on all instances.

    Args:
        communicator: the other instances.
        bin_edge_location: the value from which elements count as large, as a part of half's
            largest value.
        threshold_upper_count_proportion: how many of all elements may be large, as a part of 1.
        update_period: the factor is adapted once in so many steps.

    Attributes:
        factor: a power of two.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bin_edge_location: float = 0.125,
        threshold_upper_count_proportion: float = 1e-7,
        update_period: int = 1,
    ) -> None:
        self.factor = 1.0
        self._communicator = communicator
        largest = torch.finfo(torch.float16).max
        self._edge = largest * bin_edge_location
        self._allowed = threshold_upper_count_proportion
        self._period = update_period
        self._steps = 0

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        return {"factor": self.factor, "steps": self._steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.factor, self._steps = float(state["factor"]), int(state["steps"])

    @property
    def _ends_period(self) -> bool:
        """Whether the factor is adapted after the present step."""
        return (self._steps + 1) % self._period == 0

    def overflows(self, gradients: Gradients) -> bool:
        """Tell whether too many elements are near half's largest value; collective.

        Looks at the gradients of every instance before they are reduced, and only in a step after
        which the factor is adapted.
        """
        if not self._ends_period:
            return False
        counts = np.zeros(2)
        for gradient in (gradient for local in gradients.local_sums() for gradient in local):
            # Not "greater than": a NaN is too large as well.
            inside = torch.count_nonzero(gradient.abs() <= self._edge)
            counts += (gradient.numel() - int(inside), gradient.numel())
        self._communicator.all_reduce(counts, name="gradients near half's largest value")
        return bool(counts[0] > self._allowed * counts[1])

    def adapt(self, too_large: bool, loss_scale: float) -> None:
        """End a step that ran with ``loss_scale``, the factor included: halve or double it."""
        change = 0.5 if too_large else 2.0
        if self._ends_period and 1 / _LARGEST <= loss_scale * change <= _LARGEST:
            self.factor *= change
        self._steps += 1
