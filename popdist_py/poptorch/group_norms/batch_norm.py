"""Batch norm over the micro-batches of a group of replicas, forward and backward.

Every replica computes the count, the mean and the sum of squared deviations of its own samples. The
mean and the variance of a group are computed from the counts, means and sums of the group's
replicas, always in the order of the replicas. The module ``batch_norm`` does not decide which
replicas belong to a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from popdist_py.errors import counted
from popdist_py.poptorch.group_norms.statistics_exchange import OF_GROUP, GroupExchange

__all__ = ["GroupNorms", "OneValueAllowed", "replicas_as_channels"]

_ATEN: Final = torch.ops.aten
_BATCH_NORM: Final = F.batch_norm
_replicas: Final[ContextVar[int]] = ContextVar("replicas", default=1)


@contextmanager
def replicas_as_channels(replicas: int) -> Iterator[None]:
    """Treat batch norm inputs as inputs of several replicas, concatenated along the channels.

    Args:
        replicas: The number of replicas whose channels are concatenated in one tensor.
    """
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


class GroupNorms(TorchFunctionMode):
    """A torch function mode that makes training batch norms use the statistics of a replica group.

    Enter GroupNorms before all other torch function modes. If GroupNorms were entered last, other
    modes would receive the calls of the replacement function instead of the model's calls of
    ``batch_norm``.

    Args:
        exchange: The exchange of statistics between the replicas of a group.
    """

    def __init__(self, exchange: GroupExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, but call GroupNorms's own batch norm if ``func`` is ``batch_norm``."""
        if func is _BATCH_NORM:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """Normalise ``input`` with the mean and variance over all samples of the group."""
        if not training:
            return _BATCH_NORM(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        if torch._C._functorch.is_batchedtensor(input):
            raise RuntimeError(
                "a batch norm with statistics of a group of replicas cannot run inside "
                "torch.func.vmap"
            )
        # Statistics of float16 inputs are computed in float32, as in torch's batch norm.
        own = torch.float64 if input.dtype == torch.float64 else torch.float32
        apply: Callable[..., tuple[torch.Tensor, ...]] = _GroupNorm.apply
        result, mean, variance = apply(
            input.to(own),
            None if weight is None else weight.to(own),
            None if bias is None else bias.to(own),
            eps,
            _replicas.get(),
            self._exchange.handle,
        )
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, variance)):
                if running is not None:
                    running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
        return result.to(input.dtype)


class OneValueAllowed(TorchFunctionMode):
    """A torch function mode that lets training batch norms accept one value for each channel.

    Without ``OneValueAllowed``, torch rejects inputs of a training batch norm with a single value
    per channel. Use ``OneValueAllowed`` for the first forward pass, which runs a single replica. In
    later forward passes, the replicas of a group together have more than one value per channel.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, but call ``batch_norm`` without its check of the input shape."""
        if func is not _BATCH_NORM:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(_BATCH_NORM).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        named = given.arguments
        statistics = named["running_mean"], named["running_var"]
        settings = named["training"], named["momentum"], named["eps"]
        return torch.batch_norm(
            named["input"], named["weight"], named["bias"], *statistics, *settings, False
        )


class _GroupNorm(torch.autograd.Function):
    """The autograd function of a batch norm with the statistics of a replica group.

    A call of ``_GroupNorm.apply`` returns the normalised samples, the group's mean and the group's
    unbiased variance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        samples: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        replicas: int,
        handle: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise samples of the shape [micro-batch, replicas x channels, ...]."""
        channels = samples.shape[1] // replicas
        ctx.eps, ctx.handle, ctx.rows = eps, handle, (replicas, channels)
        mean, variance, total = _statistics_of_group(samples, replicas, handle)
        result = torch.native_batch_norm(samples, weight, bias, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(samples, weight, mean, variance, total)
        # Without ``clamp(min=1)``, the unbiased variance of a single sample would be 0 / 0. With
        # ``clamp(min=1)``, the unbiased variance of a single sample is 0.
        unbiased = variance * (total / (total - 1).clamp(min=1))
        ctx.mark_non_differentiable(mean, unbiased)
        return result, mean, unbiased

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients of a batch norm's inputs ``samples``, ``weight`` and ``bias``.

        The gradients of ``weight`` and ``bias`` are sums over one replica's samples, not over the
        samples of the group.
        """
        samples, weight, mean, variance, total = ctx.saved_tensors
        scale = (variance + ctx.eps).rsqrt()
        # The gradients of weight and bias are sums over the samples of one replica. The samples are
        # normalised with the group's mean and standard deviation.
        _, of_weight, of_bias = _ATEN.native_batch_norm_backward(
            gradient, samples, None, None, None, mean, scale, True, ctx.eps, [False, True, True]
        )
        of_samples = None
        if ctx.needs_input_grad[0]:
            replicas, channels = ctx.rows
            rows = torch.cat([of_bias.view(replicas, -1), of_weight.view(replicas, -1)], 1)
            name = f"batch norm of {counted(channels, 'channel')} (backward)"
            sums = _sum(OF_GROUP(rows, ctx.handle, name))
            of_means, of_scales = (part.reshape(-1) / total for part in sums.split(channels, 1))
            factor = scale if weight is None else scale * weight
            shape = [1, -1] + [1] * (samples.dim() - 2)
            deviations = (samples - mean.view(shape)) * (scale * of_scales).view(shape)
            of_samples = (gradient - of_means.view(shape) - deviations) * factor.view(shape)
        has_weight, has_bias = ctx.needs_input_grad[1:3]
        return (
            of_samples,
            of_weight if has_weight else None,
            of_bias if has_bias else None,
            *(None, None, None),
        )


def _statistics_of_group(
    samples: torch.Tensor, replicas: int, handle: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, the biased variance and the number of samples of each replica's group.

    The formula comes from Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979. The paper of Chan, Golub and LeVeque combines two sets of
    samples at a time. ``_statistics_of_group`` combines the samples of all replicas of a group at
    once.

    Args:
        samples: A tensor of the shape [micro-batch, replicas x channels, ...].
        replicas: The number of replicas whose channels ``samples`` contains.
        handle: The attribute ``handle`` of the ``GroupExchange`` (the exchange of numbers between
            the replicas of a group).

    Returns:
        Three tensors of the shape [replicas x channels]: mean, biased variance and number of
        samples.
    """
    channels = samples.shape[1] // replicas
    mean, variance = torch.batch_norm_update_stats(samples, None, None, 0.0)
    number = samples.numel() // samples.shape[1]
    own = [
        mean.new_full((replicas, 1), number),
        mean.view(replicas, channels),
        variance.view(replicas, channels) * number,
    ]
    name = f"batch norm of {counted(channels, 'channel')} (forward)"
    told = OF_GROUP(torch.cat(own, 1), handle, name)
    numbers, means, squares = told.split([1, channels, channels], 2)
    total = _sum(numbers)
    mean = _sum(numbers * means) / total
    away = means - mean.unsqueeze(1)
    variance = _sum(squares + numbers * away * away) / total
    return mean.reshape(-1), variance.reshape(-1), total.expand_as(mean).reshape(-1)


def _sum(told: torch.Tensor) -> torch.Tensor:
    """Sum a tensor [replicas, replicas of the group, numbers] over dimension 1, in index order."""
    return reduce(torch.add, told.unbind(1))
