"""The class Training, which accumulates a model's gradients and updates its weights.

An accumulation window consists of the micro-batches between two weight updates. In an accumulation
window, the gradients are cleared, accumulated and summed over all replicas, and the optimiser
updates the weights. No other module waits for the reduction of gradients or runs the optimiser. The
module ``gradients.py`` sums gradients, and ``loss_scaling.py`` adapts the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.autograd.graph import increment_version

from popdist_py import activities
from popdist_py.poptorch.update.compressed.compression import CompressedGradients
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.update.half_accumulators import round_gradients
from popdist_py.poptorch.update.loss_scaling import AutomaticLossScaling
from popdist_py.torch_states.memory_copies import wait_for_copies

__all__ = ["NoUpdate", "Training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The gradient reduction and the weight update of a training model.

    Attributes:
        optimizer: The optimiser that updates the device's copy of the weights.
        gradients: The object that sums gradients over all replicas of all instances.
        gradient_scale: The factor that multiplies every micro-batch's gradients, without the loss
            scale. ``gradient_scale`` is 1 / (number of micro-batches in an accumulation window x
            number of all replicas) for a mean of gradients, and 1 for a sum of gradients.
        half_accumulators: Whether gradients are rounded to float16 after every micro-batch.
        scaler: The object that adapts the loss scale; None if the program sets the loss scale.
        rounding: A function that seeds the random generator for stochastic rounding in a weight
            update; None to round weights to the nearest number. The argument of ``rounding`` is the
            number of the micro-batch that runs just before the weight update.
        compression: The compression of gradients between hosts; None if gradients are not
            compressed.
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
        """The factor that multiplies the loss, and that the weight update removes again."""
        factor = 1.0 if self.scaler is None else self.scaler.factor
        return self.optimizer.loss_scaling * factor

    @property
    def scale(self) -> float:
        """The total factor on the gradients of every micro-batch, including the loss scale."""
        return self.gradient_scale * self.loss_scale

    def zero(self) -> None:
        """Start an accumulation window, and clear the gradients."""
        if self.compression is not None:
            self.compression.begin(self.loss_scale)
        self.gradients.zero()

    def accumulate(self) -> None:
        """Round the gradients after a micro-batch, if gradients are accumulated in float16."""
        if self.half_accumulators:
            round_gradients(self.gradients)

    def step(self, number: int) -> None:
        """Sum the gradients of an accumulation window over all replicas, and update the parameters.

        Args:
            number: The number of the last micro-batch in the accumulation window.
        """
        wait_for_copies()
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
            # The method step_in_parts also waits for the reduction of gradients. The time of
            # waiting for the reduction of gradients is not recorded as time of updating weights.
            with activities.doing(activities.UPDATING):
                self.optimizer.step_in_parts(loss_scale, parts)
        # The version counters of parameters are increased, because torch's fused updates change
        # parameters without increasing the counters.
        increment_version(self.optimizer.parameters)
        if self.scaler is not None:
            self.scaler.adapt(too_large, loss_scale)


class NoUpdate:
    """A replacement for ``Training`` in inference models, whose methods do nothing."""

    scale = 1.0

    def zero(self) -> None:
        """Do nothing, because an inference model does not compute gradients."""

    def accumulate(self) -> None:
        """Do nothing, because an inference model does not compute gradients."""

    def step(self, number: int) -> None:
        """Do nothing, because the weights of an inference model are not updated."""
