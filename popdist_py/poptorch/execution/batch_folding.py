"""Operations that torch vectorises badly, run once with the replicas folded into the batch.

Only while a graph of all replicas is captured. Each sample's result must not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

__all__ = ["folded_batches"]

_functorch: Any = torch._C._functorch


@contextmanager
def folded_batches() -> Iterator[None]:
    """Fold attention, group norms, losses and recurrent layers inside ``vmap``."""
    with ExitStack() as stack:
        for place, name, dims in (
            (F, "scaled_dot_product_attention", (0, 0, 0)),
            (F, "group_norm", (0,)),
        ):
            function = _folding(getattr(place, name), dims)
            stack.enter_context(mock.patch.object(place, name, function))
        for name in ("cross_entropy", "nll_loss"):
            stack.enter_context(mock.patch.object(F, name, _folding_loss(getattr(F, name))))
        for name in ("gru", "lstm"):
            stack.enter_context(
                mock.patch.object(torch._VF, name, _folding_recurrent(getattr(torch._VF, name)))
            )
        yield


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(_functorch.is_batchedtensor(value))


def _folding(function: Callable[..., Any], dims: Sequence[int]) -> Callable[..., Any]:
    """Return ``function`` for leading arguments whose batch dimension is given in ``dims``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leading, rest = args[: len(dims)], args[len(dims) :]
        others = [*rest, *kwargs.values()]
        if not any(map(_is_batched, leading)) or any(map(_is_batched, others)):
            return function(*args, **kwargs)
        size = _batch_size(leading)
        plain = [_fold(value, dim, size) for value, dim in zip(leading, dims, strict=True)]
        level = _functorch.maybe_current_level()
        with temporarily_pop_interpreter_stack():
            result = function(*plain, *rest, **kwargs)
            result = result.unflatten(0, (size, -1))
        return _functorch._add_batch_dim(result, 0, level)

    return run


def _folding_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss over classes; each replica's mean is over its own samples."""

    def run(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        settings = dict(kwargs)
        reduction = settings.pop("reduction", "mean")
        ignored = settings.pop("ignore_index", -100)
        is_foldable = reduction in ("none", "sum", "mean") and not (args or any(settings.values()))
        if not is_foldable or not (_is_batched(input) and _is_batched(target)):
            return function(input, target, *args, **kwargs)
        if input.dim() < 2 or target.is_floating_point():
            return function(input, target, *args, **kwargs)
        size = _batch_size([input])
        scores, classes = _fold(input, 0, size), _fold(target, 0, size)
        level = _functorch.maybe_current_level()
        with temporarily_pop_interpreter_stack():
            losses = function(scores, classes, ignore_index=ignored, reduction="none")
            result = losses.unflatten(0, (size, -1))
            if reduction != "none":
                result = result.flatten(1).sum(1)
            if reduction == "mean":
                result = result / (classes != ignored).view(size, -1).sum(1)
        return _functorch._add_batch_dim(result, 0, level)

    return run


def _folding_recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer's function; hidden states have their batch in dimension 1."""

    def run(sequence: Any, hidden: Any, weights: Any, *settings: Any) -> Any:
        packed = len(settings) != 6
        if packed or not _is_batched(sequence) or any(map(_is_batched, weights)):
            return function(sequence, hidden, weights, *settings)
        dim = 0 if settings[-1] else 1
        size = _batch_size([sequence])
        states = [hidden] if isinstance(hidden, torch.Tensor) else list(hidden)
        folded = [_fold(state, 1, size) for state in states]
        plain = _fold(sequence, dim, size)
        level = _functorch.maybe_current_level()
        with temporarily_pop_interpreter_stack():
            first = folded[0] if isinstance(hidden, torch.Tensor) else tuple(folded)
            output, *last = function(plain, first, weights, *settings)
            results = [output.unflatten(dim, (size, -1))]
            results += [state.unflatten(1, (size, -1)) for state in last]
        dims = [dim] + [1] * len(last)
        return tuple(
            _functorch._add_batch_dim(result, at, level)
            for result, at in zip(results, dims, strict=True)
        )

    return run


def _batch_size(values: Sequence[Any]) -> int:
    """Return the number of replicas."""
    batched = next(value for value in values if _is_batched(value))
    plain = _functorch.get_unwrapped(batched)
    return int(plain.shape[_functorch.maybe_get_bdim(batched)])


def _fold(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the values of all replicas with their batch dimension ``dim`` in one tensor."""
    if _is_batched(value):
        at = _functorch.maybe_get_bdim(value)
        plain = _functorch.get_unwrapped(value)
    else:
        at, plain = 0, value
    with temporarily_pop_interpreter_stack():
        if not _is_batched(value):
            plain = plain.unsqueeze(0).expand(size, *plain.shape)
        # The replicas move right before the batch, so that both become one dimension.
        together: torch.Tensor = plain.movedim(at, dim).flatten(dim, dim + 1)
        return together
