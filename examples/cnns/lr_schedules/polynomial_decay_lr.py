"""A learning rate that falls as a polynomial, with an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from lr_schedules.schedule import Schedule

__all__ = ["PolynomialDecay"]


@dataclass(frozen=True)
class PolynomialDecay(Schedule):
    """From the base to a part of it.

    Attributes:
        power: of the polynomial: 1 is a straight line, 2 falls fast at first.
        end_ratio: the last rate, in parts of the base.
    """

    power: float
    end_ratio: float

    def way_down(self, epoch: float) -> float:
        """Return the last rate, and (1 - the part that is done)^power of what is above it."""
        left = (1 - self.span.after_warmup(epoch)) ** self.power
        return self.base * (self.end_ratio + (1 - self.end_ratio) * left)
