"""A learning rate that falls as a polynomial, with an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from lr_schedules.schedule import Schedule

__all__ = ["PolynomialDecay"]


@dataclass(frozen=True)
class PolynomialDecay(Schedule):
    """A decay from the base rate to a fraction of the base rate.

    Attributes:
        power: The power of the polynomial. 1 is a straight line, and 2 falls faster at first.
        end_ratio: The last rate as a fraction of the base rate.
    """

    power: float
    end_ratio: float

    def decayed(self, epoch: float) -> float:
        """Return the last rate plus (1 - progress)^power x (base rate - last rate)."""
        left = (1 - self.span.after_warmup(epoch)) ** self.power
        return self.base * (self.end_ratio + (1 - self.end_ratio) * left)
