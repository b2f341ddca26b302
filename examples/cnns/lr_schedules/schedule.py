"""What all schedules share: how long a training is, and the warm-up before the way down."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule", "Span"]


@dataclass(frozen=True)
class Span:
    """How long a training is.

    Attributes:
        epochs: of the training.
        warmup: epochs in which the rate rises from 0; a training may be shorter than that.
    """

    epochs: float
    warmup: float = 0.0

    def after_warmup(self, epoch: float) -> float:
        """Return how much of what follows the warm-up is done, from 0 to 1."""
        rest = self.epochs - self.warmup
        return min(max((epoch - self.warmup) / rest, 0.0), 1.0) if rest > 0 else 0.0


@dataclass(frozen=True)
class Schedule:
    """A rate for each moment of a training.

    Attributes:
        base: the highest rate.
        span: of the training.
    """

    base: float
    span: Span

    def rate(self, epoch: float) -> float:
        """Return the rate after so many epochs.

        The warm-up is a straight line from 0 to what the rate is at its end. In a training that
        ends before, nothing goes down: the line is that to the base.
        """
        warmup = self.span.warmup
        if epoch >= warmup:
            return self.way_down(epoch)
        top = self.way_down(warmup) if warmup < self.span.epochs else self.base
        return top * (epoch / warmup)

    def way_down(self, epoch: float) -> float:
        """Return what the rate is without a warm-up."""
        raise NotImplementedError
