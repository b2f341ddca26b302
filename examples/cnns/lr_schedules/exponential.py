"""A learning rate that falls by the same factor in equal times, with an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from lr_schedules.schedule import Schedule

__all__ = ["Exponential"]


@dataclass(frozen=True)
class Exponential(Schedule):
    """Without steps: between two decays too.

    Attributes:
        factor: of one decay.
        decay_epochs: what one decay takes.
    """

    factor: float
    decay_epochs: float

    def way_down(self, epoch: float) -> float:
        """Return the base times the factor for each decay since the warm-up."""
        since = max(epoch - self.span.warmup, 0.0)
        return self.base * self.factor ** (since / self.decay_epochs)
