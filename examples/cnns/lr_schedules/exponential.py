"""A learning rate that decays exponentially, with an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from lr_schedules.schedule import Schedule

__all__ = ["Exponential"]


@dataclass(frozen=True)
class Exponential(Schedule):
    """A continuous decay, without steps.

    Attributes:
        factor: The factor of the decay in ``decay_epochs`` epochs.
        decay_epochs: The number of epochs in which the rate decays by the factor.
    """

    factor: float
    decay_epochs: float

    def decayed(self, epoch: float) -> float:
        """Return the base rate times the factor to the power of the decays since the warm-up."""
        since = max(epoch - self.span.warmup, 0.0)
        return self.base * self.factor ** (since / self.decay_epochs)
