"""A learning rate that falls in steps, with an optional warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lr_schedules.schedule import Schedule

__all__ = ["Stepped"]


@dataclass(frozen=True)
class Stepped(Schedule):
    """A schedule that multiplies the rate by a factor at each step.

    Attributes:
        steps: The times of the steps as fractions of the whole training.
        factors: One factor for each step, or a single factor for all steps.

    Raises:
        ValueError: The number of factors differs from the number of steps.
    """

    steps: tuple[float, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.factors) not in (1, len(self.steps)):
            raise ValueError(
                f"--learning-rate-decay has {len(self.factors)} factors and "
                f"--learning-rate-schedule {len(self.steps)} steps: give one factor, or as many "
                "as steps"
            )

    def decayed(self, epoch: float) -> float:
        """Return the base rate times the factors of all steps so far."""
        done = epoch / self.span.epochs
        factors = self.factors if len(self.factors) > 1 else self.factors * len(self.steps)
        pairs = zip(self.steps, factors, strict=True)
        return self.base * math.prod(factor for step, factor in pairs if step <= done)
