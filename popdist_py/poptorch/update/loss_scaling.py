"""Automatic loss scaling, which keeps float16 gradients in the range of float16.

After a weight update, the loss scale is halved if too many elements of the gradients are near the
largest float16 value. If few enough elements of the gradients are near the largest float16 value,
the loss scale is doubled. The rule for halving and doubling the loss scale comes from PopART,
Graphcore's runtime library. Like torch.amp.GradScaler, the class AutomaticLossScaling inspects
gradients and adapts the loss scale, a number that multiplies the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.poptorch.update.gradients import Gradients

__all__ = ["AutomaticLossScaling"]

# The largest power of two in float16. A loss scale stays between _LARGEST and the inverse of
# _LARGEST.
_LARGEST: Final = 2.0**15


class AutomaticLossScaling:
    """A factor on the optimiser's ``loss_scaling`` that is adapted equally on all instances.

    Args:
        communicator: The communicator that connects the instances.
        bin_edge_location: The magnitude above which a gradient element counts as large, as a
            fraction of the largest float16 value.
        threshold_upper_count_proportion: The largest accepted number of large gradient elements, as
            a proportion of all gradient elements.
        update_period: The number of training steps between two changes of the loss scaling factor.

    Attributes:
        factor: The power of two by which the optimiser's ``loss_scaling`` is multiplied at present.
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
        """Return the state of automatic loss scaling for a checkpoint."""
        return {"factor": self.factor, "steps": self._steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a loss scaling state that :meth:`state` returned."""
        self.factor, self._steps = float(state["factor"]), int(state["steps"])

    @property
    def _ends_period(self) -> bool:
        """Whether the loss scaling factor will be adapted after the present training step."""
        return (self._steps + 1) % self._period == 0

    def overflows(self, gradients: Gradients) -> bool:
        """Tell whether too many gradient elements are near the largest float16 number.

        All instances must call the method ``overflows`` together. ``overflows`` counts elements of
        every instance's gradients before the gradients are summed over the instances. ``overflows``
        returns False without counting if the loss scaling factor will not be adapted after the
        present training step.
        """
        if not self._ends_period:
            return False
        counts = np.zeros(2)
        for gradient in (gradient for local in gradients.local_sums() for gradient in local):
            # The gradient elements at or below the threshold are counted and subtracted from all
            # elements, so that NaN counts as large.
            inside = torch.count_nonzero(gradient.abs() <= self._edge)
            counts += (gradient.numel() - int(inside), gradient.numel())
        self._communicator.all_reduce(counts, name="gradients near half's largest value")
        return bool(counts[0] > self._allowed * counts[1])

    def adapt(self, too_large: bool, loss_scale: float) -> None:
        """Halve or double the loss scaling factor after every ``update_period`` training steps.

        Args:
            too_large: Whether ``overflows`` found too many large elements in the gradients.
            loss_scale: The loss scale of the training step, which includes the adaptive factor.
        """
        change = 0.5 if too_large else 2.0
        if self._ends_period and 1 / _LARGEST <= loss_scale * change <= _LARGEST:
            self.factor *= change
        self._steps += 1
