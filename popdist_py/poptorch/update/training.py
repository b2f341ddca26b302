"""One accumulation window of a training model: zero, accumulate, reduce, step.

The only place that reduces gradients and runs the optimiser. What the parts do is theirs:
``gradients.py`` adds up, ``loss_scaling.py`` looks and adapts, the optimisers update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from popdist_py import activities
from popdist_py.poptorch.update.compression import CompressedGradients
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.update.half_accumulators import round_gradients
from popdist_py.poptorch.update.loss_scaling import AutomaticLossScaling

__all__ = ["NoUpdate", "Training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a training model has beyond its forward.

    Attributes:
        optimizer: the update.
        gradients: the reduction over replicas and instances.
        gradient_scale: factor on every micro-batch's gradients, without the loss scaling:
            1 / (GA x all replicas) for a mean, 1 for a sum.
        half_accumulators: whether gradients are rounded to half after every micro-batch.
        scaler: adapts the loss scaling; None if it stays as the program sets it.
        rounding: told the number of a step before its update draws random numbers to round with;
            None if it rounds to the nearest.
        compression: of what hosts send one another; None if it is sent as it is.
    """

    optimizer: DeviceOptimizer
    gradients: Gradients
    gradient_scale: float
    half_accumulators: bool = False
    scaler: AutomaticLossScaling | None = None
    rounding: Callable[[int], None] | None = None
    compression: CompressedGradients | None = None

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, which the update takes out of the gradients again."""
        factor = 1.0 if self.scaler is None else self.scaler.factor
        return self.optimizer.loss_scaling * factor

    @property
    def scale(self) -> float:
        """Factor on every micro-batch's gradients."""
        return self.gradient_scale * self.loss_scale

    def zero(self) -> None:
        """Start an accumulation window."""
        if self.compression is not None:
            self.compression.begin(self.loss_scale)
        self.gradients.zero()

    def accumulate(self) -> None:
        """Note that all local replicas added the gradients of a micro-batch."""
        if self.half_accumulators:
            round_gradients(self.gradients)

    def step(self, number: int) -> None:
        """Reduce the window's gradients and update the parameters, after micro-batch ``number``."""
        if self.rounding is not None:
            self.rounding(number)
        loss_scale = self.loss_scale
        too_large = self.scaler is not None and self.scaler.overflows(self.gradients)
        parts = self.gradients.in_parts() if self.optimizer.updates_each_alone else None
        if parts is None:
            with activities.doing(activities.REDUCING, "gradients"):
                self.gradients.all_reduce()
            with activities.doing(activities.UPDATING):
                self.optimizer.step(loss_scale)
        else:
            # What it waits for the reduction of a part is not the update's.
            with activities.doing(activities.UPDATING):
                self.optimizer.step_in_parts(loss_scale, parts)
        if self.scaler is not None:
            self.scaler.adapt(too_large, loss_scale)


class NoUpdate:
    """What an inference model does around its micro-batches: nothing."""

    scale = 1.0

    def zero(self) -> None:
        """Do nothing."""

    def accumulate(self) -> None:
        """Do nothing."""

    def step(self, number: int) -> None:
        """Do nothing."""
