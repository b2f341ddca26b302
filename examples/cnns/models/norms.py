"""The norm layers of the networks: batch or group normalisation of the channels."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["Norm", "make"]

#: A function that makes a norm layer for a number of channels.
Norm = Callable[[int], nn.Module]


def make(args: argparse.Namespace) -> Norm:
    """Return a function that makes the norm layers of a network.

    Raises:
        ValueError: --BN-momentum is not a number from 0 to below 1.
    """
    if args.norm == "group":
        return partial(_group_norm, most_groups=args.groups)
    if not 0 <= args.bn_momentum < 1:
        raise ValueError(
            f"--BN-momentum {args.bn_momentum} is given, the share of the running statistics that "
            "a step keeps: a number from 0 to below 1 is accepted"
        )
    # torch's momentum is the share of the new statistics. --BN-momentum is the share of the old
    # statistics.
    return partial(nn.BatchNorm2d, momentum=1 - args.bn_momentum)


def _group_norm(channels: int, most_groups: int) -> nn.GroupNorm:
    """Return a norm with at most ``most_groups`` groups of the same number of channels."""
    most = min(most_groups, channels)
    groups = next(number for number in range(most, 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels)
