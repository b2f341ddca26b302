"""Stochastic rounding to half: up or down at random, so that the expectation is exact."""

from __future__ import annotations

import torch

__all__ = ["stochastic_half"]

# Bits that float32's mantissa has beyond half's.
_DROPPED = 13


def stochastic_half(values: torch.Tensor) -> torch.Tensor:
    """Return float32 ``values`` as float16, rounded up or down in proportion to the distance.

    Values below half's normal range (6.1e-5) round to a multiple of its smallest step, 2^-24.
    """
    noise = torch.rand_like(values)
    # Adding noise to the dropped bits carries into the kept ones with the right probability.
    bits = values.view(torch.int32) + (noise * (1 << _DROPPED)).to(torch.int32)
    normal = (bits & ~((1 << _DROPPED) - 1)).view(torch.float32)
    small = torch.floor(values * 2.0**24 + noise) * 2.0**-24
    return torch.where(values.abs() < 2.0**-14, small, normal).to(torch.float16)
