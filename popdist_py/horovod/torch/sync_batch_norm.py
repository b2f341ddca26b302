"""Horovod's SyncBatchNorm, a batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from popdist_py.horovod.torch.allreduce_ops import allreduce
from popdist_py.horovod.torch.basics import size
from popdist_py.horovod.torch.calls import Sum

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """A batch norm that, in training, uses the mean and variance over the batches of all ranks.

    The arguments are the same as for ``torch.nn.BatchNorm2d``. The input has the shape
    [batch, channels, ...]. In evaluation, or with one rank, the module behaves like torch's batch
    norm.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: expected an input with at least 2 dimensions, got {input.dim()}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input."""
        self._check_input_dim(input)
        if not self.training or size() == 1:
            return super().forward(input)
        shape = (1, -1, *(1,) * (input.dim() - 2))
        others = [dim for dim in range(input.dim()) if dim != 1]
        x = input if input.dtype == torch.float64 else input.float()
        own_count = x.new_tensor([x.numel() // x.shape[1]])
        totals = allreduce(torch.cat([x.sum(others), own_count]), op=Sum, name="batch_norm.mean")
        mean, count = totals[:-1] / totals[-1], totals[-1].detach()
        centred = x - mean.reshape(shape)
        squares = allreduce(centred.square().sum(others), op=Sum, name="batch_norm.variance")
        variance = squares / count
        self._update_statistics(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        y = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running mean and variance with the mean and variance of the ranks' batches."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            weight = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)
