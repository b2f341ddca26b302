"""Functions of PopTorch's API that a program's tests can use."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(
    expected: Any,
    actual: Any,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Tell whether two values, or two nested structures of tensors, are equal within tolerances."""
    if isinstance(expected, torch.Tensor):
        return bool(
            torch.allclose(
                torch.as_tensor(actual, dtype=expected.dtype), expected, rtol, atol, equal_nan
            )
        )
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(
            allclose(value, actual[key], rtol, atol, equal_nan) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(
            allclose(a, b, rtol, atol, equal_nan) for a, b in zip(expected, actual, strict=True)
        )
    return bool(expected == actual)
