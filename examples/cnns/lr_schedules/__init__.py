"""Learning rate schedules: a warm-up, followed by one of four kinds of decay.

Each module has one kind of decay, as a frozen subclass of ``Schedule``. A schedule is a pure
function from epochs to rates, so a resumed training has the same rates as an uninterrupted
training.
"""

from __future__ import annotations

import argparse

from lr_schedules.cosine import Cosine
from lr_schedules.exponential import Exponential
from lr_schedules.polynomial_decay_lr import PolynomialDecay
from lr_schedules.schedule import Schedule, Span
from lr_schedules.stepped import Stepped

__all__ = ["Cosine", "Exponential", "PolynomialDecay", "Schedule", "Span", "Stepped", "make"]


def make(args: argparse.Namespace, *, epochs: float, global_batch: int) -> Schedule:
    """Return the schedule that the arguments describe.

    The highest rate is 2^N x global batch, where N is ``--base-learning-rate-exponent``. The same N
    is therefore suitable for many batch sizes.

    Args:
        args: All options.
        epochs: The length of the training in epochs, which may be a fraction.
        global_batch: The number of images for one weight update.

    Raises:
        ValueError: The numbers of factors and of steps of a stepped schedule differ.
    """
    base = 2.0**args.base_learning_rate_exponent * global_batch
    span = Span(epochs, args.warmup_epochs)
    if args.lr_schedule == "cosine":
        return Cosine(base, span)
    if args.lr_schedule == "exponential":
        return Exponential(base, span, args.lr_decay_rate, args.lr_decay_epochs)
    if args.lr_schedule == "polynomial_decay_lr":
        return PolynomialDecay(base, span, args.poly_power, args.poly_end_ratio)
    steps, factors = tuple(args.learning_rate_schedule), tuple(args.learning_rate_decay)
    return Stepped(base, span, steps, factors)
