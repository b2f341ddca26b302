"""The base class of all schedules, with the length of the training and the warm-up."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule", "Span"]


@dataclass(frozen=True)
class Span:
    """The length of a training and of its warm-up.

    Attributes:
        epochs: The length of the training in epochs.
        warmup: The number of epochs in which the rate rises from 0. A training may be shorter.
    """

    epochs: float
    warmup: float = 0.0

    def after_warmup(self, epoch: float) -> float:
        """Return the progress after the warm-up, from 0 to 1."""
        rest = self.epochs - self.warmup
        return min(max((epoch - self.warmup) / rest, 0.0), 1.0) if rest > 0 else 0.0


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each moment of a training.

    Attributes:
        base: The highest rate.
        span: The length of the training and of its warm-up.
    """

    base: float
    span: Span

    def rate(self, epoch: float) -> float:
        """Return the rate after a number of epochs.

        During the warm-up, the rate rises linearly from 0 to the rate at the end of the warm-up. If
        the training ends before the warm-up, the rate rises towards the base rate.
        """
        warmup = self.span.warmup
        if epoch >= warmup:
            return self.decayed(epoch)
        top = self.decayed(warmup) if warmup < self.span.epochs else self.base
        return top * (epoch / warmup)

    def decayed(self, epoch: float) -> float:
        """Return the rate without a warm-up."""
        raise NotImplementedError
