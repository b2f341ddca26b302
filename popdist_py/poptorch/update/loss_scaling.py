"""Automatic loss scaling: the factor on the loss that keeps half gradients in range.

The rule is PopART's: after every update the scale is halved if too many elements of the gradients
are near half's largest value, and doubled otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.gradients import Gradients

__all__ = ["AutomaticLossScaling"]

_SETTINGS: Final = "automaticLossScalingSettings."
# The largest power of two that half holds; scales stay between it and its inverse.
_LARGEST: Final = 2.0**15


class AutomaticLossScaling:
    """Adapts a factor on the optimiser's own ``loss_scaling``, equal on all instances.

    Args:
        optimizer: whose loss scaling it multiplies.
        gradients: where gradients add up before they are reduced.
        replicas: how many replicas have gradients of their own; 1 if all share the same.
        communicator: the other instances.
        settings: session options: binEdgeLocation (as a part of half's largest value, 0.125),
            thresholdUpperCountProportion (of all elements, 1e-7), updatePeriod (in steps, 1).
    """

    def __init__(
        self,
        optimizer: DeviceOptimizer,
        gradients: Gradients,
        replicas: int,
        communicator: Communicator,
        settings: Mapping[str, Any],
    ) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._gradients = gradients
        self._replicas = replicas
        self._communicator = communicator
        largest = torch.finfo(torch.float16).max
        self._edge = largest * float(settings.get(f"{_SETTINGS}binEdgeLocation", 0.125))
        self._allowed = float(settings.get(f"{_SETTINGS}thresholdUpperCountProportion", 1e-7))
        self._period = int(settings.get(f"{_SETTINGS}updatePeriod", 1))
        self._steps = 0

    def update(self) -> None:
        """Reduce the gradients, update the parameters, and adapt the factor."""
        self._steps += 1
        adapts = self._steps % self._period == 0
        too_large = adapts and self._are_too_large(self._optimizer.parameters)
        self._gradients.finish()
        own = self._optimizer.loss_scaling
        self._optimizer.loss_scaling = own * self.factor
        self._optimizer.step()
        self._optimizer.loss_scaling = own
        if adapts:
            scale = own * self.factor * (0.5 if too_large else 2.0)
            if 1 / _LARGEST <= scale <= _LARGEST:
                self.factor = scale / own

    def _are_too_large(self, parameters: Sequence[torch.Tensor]) -> bool:
        counts = np.zeros(2)
        for replica in range(self._replicas):
            self._gradients.enter(replica)
            for gradient in (p.grad for p in parameters if p.grad is not None):
                # Not "greater than": a NaN is too large as well.
                inside = torch.count_nonzero(gradient.abs() <= self._edge)
                counts += (gradient.numel() - int(inside), gradient.numel())
            self._gradients.leave(replica)
        self._communicator.all_reduce(counts, name="gradients near half's largest value")
        return bool(counts[0] > self._allowed * counts[1])
