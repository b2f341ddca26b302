"""The norms that networks are made with: batch or group normalisation of the channels."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["Norm", "make"]

#: Makes the norm of a number of channels.
Norm = Callable[[int], nn.Module]


def make(args: argparse.Namespace) -> Norm:
    """Return what makes the norms that the arguments ask for.

    Raises:
        ValueError: running statistics would not stay between the old and the new ones.
    """
    if args.norm == "group":
        return partial(_group_norm, most_groups=args.groups)
    if not 0 <= args.bn_momentum < 1:
        raise ValueError(
            f"--BN-momentum {args.bn_momentum} is given, the share of the running statistics that "
            "a step keeps: a number from 0 to below 1 is accepted"
        )
    # torch's momentum is the other share: that of the new statistics.
    return partial(nn.BatchNorm2d, momentum=1 - args.bn_momentum)


def _group_norm(channels: int, most_groups: int) -> nn.GroupNorm:
    """Return a norm with as many groups as divide the channels, and no more than asked for."""
    most = min(most_groups, channels)
    groups = next(number for number in range(most, 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels)
