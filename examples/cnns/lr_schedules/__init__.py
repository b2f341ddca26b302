"""Learning rates over a training: a warm-up, and then one of four ways down.

Each module has one way, a frozen ``Schedule``: a pure function from epochs to rates, so that a
training that goes on from a checkpoint has the rates of one that was not interrupted.
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

    Its highest rate is 2^N x global batch, N being ``--base-learning-rate-exponent``: so one N
    suits many batch sizes.

    Args:
        args: all options.
        epochs: of the training; a part of one is fine.
        global_batch: images of one weight update.

    Raises:
        ValueError: a stepped schedule has factors that do not go with its steps.
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
