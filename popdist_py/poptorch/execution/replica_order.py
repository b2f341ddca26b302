"""Functions for two memory orders of tensors of the shape [replicas, micro-batch, ...].

A contiguous tensor of the shape [replicas, micro-batch, ...] stores all samples of the first
replica, then all samples of the second replica, and so on. A tensor "with replicas side by side"
stores its numbers in the order [micro-batch, replicas, ...]. Its memory contains the first sample
of every replica, then the second sample of every replica, and so on. The functions of the module
``replica_order`` do not use ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["KERNELS", "REPLICAS_FIRST", "are_side_by_side", "replicas_first"]


def are_side_by_side(samples: torch.Tensor, replicas: int, batch: int) -> bool:
    """Tell whether ``samples`` is stored in memory in the order [micro-batch, replicas, ...].

    In the memory order [micro-batch, replicas, ...], the first two dimensions can be flattened into
    one dimension without a copy.

    Args:
        samples: A tensor that contains the samples of all replicas.
        replicas: The index of the replica dimension.
        batch: The index of the batch dimension.
    """
    step = samples.stride(replicas)
    return bool(step < samples.stride(batch) == step * samples.shape[replicas])


def _view(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return fresh.view(shape).movedim(1, 0)


def _unseen_view(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return a view of ``fresh`` that autograd does not record as a view."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _view(fresh, shape)


_LIBRARY: Final = torch.library.Library("popdist", "DEF")
_LIBRARY.define("replicas_first(Tensor fresh, int[] shape) -> Tensor")
_LIBRARY.impl("replicas_first", _unseen_view, "CPU")
REPLICAS_FIRST: Final = torch.ops.popdist.replicas_first.default
# For each torch operator of the module ``replica_order``, the Python function that a recorded graph
# calls directly, without torch's dispatcher.
KERNELS: Final[dict[Any, Callable[..., Any]]] = {REPLICAS_FIRST: _view}


class _ReplicasFirst(torch.autograd.Function):
    """The autograd function for the operator ``popdist::replicas_first`` and its derivative."""

    @staticmethod
    def forward(ctx: Any, fresh: torch.Tensor, shape: list[int]) -> Any:
        ctx.shape = fresh.shape
        # Autograd would raise an error for an in-place change of a view that an autograd function
        # returned. Therefore the result of the autograd function is not marked as a view.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return REPLICAS_FIRST(fresh, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.movedim(0, 1).reshape(ctx.shape), None


def replicas_first(fresh: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return a new tensor of the shape [replicas, micro-batch, ...] in the memory of ``fresh``.

    Autograd does not treat the result as a view, because changing a view in place, for example by
    an in-place ReLU, would cost several copies.

    Args:
        fresh: A new tensor that no other code uses, so that the result may use its memory.
        shape: The shape [micro-batch, replicas, ...] in which the numbers are stored in memory. The
            shape has as many elements as ``fresh``.
    """
    apply: Callable[..., torch.Tensor] = _ReplicasFirst.apply
    return apply(fresh, shape)
