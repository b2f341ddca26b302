"""Functions that compute distances between tensors, and tolerances for rounding errors.

The module ``backend_comparison.py`` uses the functions to compare the results of replica back ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

__all__ = ["Tensors", "distance", "distances", "roundings", "says_nothing"]

Tensors = list[torch.Tensor | None]

# The tolerance for rounding errors of a tensor is eps * (_ROUNDINGS * norm + _ROUNDINGS_OF_LARGEST
# * largest norm). In the formula, ``eps`` is the machine epsilon of the tensor's dtype, and
# ``norm`` is the norm of the tensor. In the formula, the largest norm is the maximum over all
# compared tensors of the same kind, such as all gradients.
_ROUNDINGS, _ROUNDINGS_OF_LARGEST = 16.0, 4.0
# To save memory, large tensors are processed in pieces of about _PIECE numbers. A search for a
# finite number in a tensor begins with the first _FEW numbers.
_PIECE: Final = 1 << 20
_FEW: Final = 16


def says_nothing(tensors: Tensors) -> set[int]:
    """Return the indices of the tensors that contain only NaN and infinities."""
    return {
        index
        for index, tensor in enumerate(tensors)
        if tensor is not None and tensor.numel() and not _has_finite(tensor)
    }


def _has_finite(tensor: torch.Tensor) -> bool:
    # The search for a finite number begins with the first numbers of the tensor, because nearly
    # always one of these numbers is finite.
    numbers = tensor.flatten() if tensor.is_contiguous() else tensor
    few = numbers[:_FEW] if numbers.dim() else numbers
    return any(bool(piece.isfinite().any()) for part in (few, tensor) for (piece,) in _pieces(part))


def distances(expected: Tensors, got: Tensors) -> list[float]:
    """Return the distance between each tensor in ``got`` and its expected tensor."""
    return [distance(a, b) for a, b in zip(expected, got, strict=True)]


def distance(expected: torch.Tensor | None, got: torch.Tensor | None) -> float:
    """Return the Euclidean norm of the difference of two tensors.

    The distance of two tensors is infinite if their shapes or dtypes differ, if only one of them is
    None, or if tensors of integers differ.
    """
    if expected is None or got is None:
        return 0.0 if expected is got else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if torch.equal(expected, got):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    norm = math.hypot(*(_norm_of_piece(a - b) for a, b in _pieces(expected, got)))
    if norm < float("inf"):
        return norm
    norm = math.hypot(*(_norm_of_piece(_difference(a, b)) for a, b in _pieces(expected, got)))
    return norm if norm < float("inf") else float("inf")


def _difference(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return the difference of two tensors, with 0 where both contain NaN or the same infinity."""
    same = (expected == got) | (expected.isnan() & got.isnan())
    return torch.where(same, torch.zeros_like(expected), expected - got)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield pieces (the same rows) of several tensors of the same shape.

    A piece of a tensor consists of some of its rows. Pieces save memory, because the difference of
    two whole tensors would need as much memory as one of the tensors.
    """
    numbers, rows = tensors[0].numel(), len(tensors[0]) if tensors[0].dim() else 1
    if numbers <= _PIECE:
        yield tensors
        return
    yield from zip(
        *(tensor.split(max(1, _PIECE * rows // numbers)) for tensor in tensors), strict=True
    )


def _norm(tensor: torch.Tensor) -> float:
    return math.hypot(*(_norm_of_piece(piece) for (piece,) in _pieces(tensor)))


def _norm_of_piece(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor, computed in float64 if float32 could overflow or underflow.

    If float32 can neither overflow nor underflow, the norm is computed in float32, because float32
    is several times faster than float64.
    """
    norm = float(torch.linalg.vector_norm(tensor.float()))
    if 1e-15 < norm < 1e15:
        return norm
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _size(tensor: torch.Tensor | None) -> float:
    """Return the norm of the finite numbers of a floating-point tensor; 0 for other tensors."""
    if tensor is None or not tensor.is_floating_point():
        return 0.0
    norm = _norm(tensor)
    return norm if norm < float("inf") else _norm(tensor.nan_to_num(0.0, 0.0, 0.0))


def roundings(tensors: Tensors) -> list[float]:
    """Return the largest distance that rounding errors may cause, for each tensor."""
    sizes = [_size(tensor) for tensor in tensors]
    largest = max(sizes, default=0.0)
    return [
        0.0
        if tensor is None or not tensor.is_floating_point()
        else torch.finfo(tensor.dtype).eps * (_ROUNDINGS * size + _ROUNDINGS_OF_LARGEST * largest)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
