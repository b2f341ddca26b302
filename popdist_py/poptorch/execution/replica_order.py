"""Two orders in which the samples of several replicas lie in memory, in tensors of one shape.

A tensor [replicas, micro-batch, ...] is either contiguous, so that a replica's samples follow each
other, or lies as [micro-batch, replicas, ...] does: sample by sample, the replicas side by side.
Nothing here knows ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["KERNELS", "REPLICAS_FIRST", "are_side_by_side", "replicas_first"]


def are_side_by_side(samples: torch.Tensor, replicas: int, batch: int) -> bool:
    """Tell whether two dimensions of ``samples`` are one in memory, the replicas behind the batch.

    Args:
        samples: of all replicas.
        replicas: which dimension they are.
        batch: which dimension the samples of each are.
    """
    step = samples.stride(replicas)
    return bool(step < samples.stride(batch) == step * samples.shape[replicas])


def _view(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return fresh.view(shape).movedim(1, 0)


def _unseen_view(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return the view without a note of it for autograd."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _view(fresh, shape)


_LIBRARY: Final = torch.library.Library("popdist", "DEF")
_LIBRARY.define("replicas_first(Tensor fresh, int[] shape) -> Tensor")
_LIBRARY.impl("replicas_first", _unseen_view, "CPU")
REPLICAS_FIRST: Final = torch.ops.popdist.replicas_first.default
# What a captured graph calls for these operators without torch's dispatcher in between.
KERNELS: Final[dict[Any, Callable[..., Any]]] = {REPLICAS_FIRST: _view}


class _ReplicasFirst(torch.autograd.Function):
    """The operator, as autograd knows it."""

    @staticmethod
    def forward(ctx: Any, fresh: torch.Tensor, shape: list[int]) -> Any:
        ctx.shape = fresh.shape
        # Not marked as a view: autograd would refuse to let one be changed in place.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return REPLICAS_FIRST(fresh, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.movedim(0, 1).reshape(ctx.shape), None


def replicas_first(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return a tensor that nobody else has as [replicas, micro-batch, ...], where it lies.

    To autograd the result is no view. If it were, to change it in place, as a ReLU may, would cost
    several copies.

    Args:
        fresh: of as many numbers as ``shape``.
        shape: [micro-batch, replicas, ...].
    """
    apply: Callable[..., torch.Tensor] = _ReplicasFirst.apply
    return apply(fresh, shape)
