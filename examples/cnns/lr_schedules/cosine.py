"""A learning rate that falls as half a wave of the cosine, with an optional warm-up."""

from __future__ import annotations

import math

from lr_schedules.schedule import Schedule

__all__ = ["Cosine"]


class Cosine(Schedule):
    """A decay from the base rate to 0 (Loshchilov and Hutter 2017, without restarts)."""

    def decayed(self, epoch: float) -> float:
        """Return the base rate times (1 + cos(pi x progress)) / 2."""
        return self.base * (1 + math.cos(math.pi * self.span.after_warmup(epoch))) / 2
