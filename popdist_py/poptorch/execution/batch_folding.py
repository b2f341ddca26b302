"""Replacements for those torch functions that are slow inside ``vmap``.

A replacement folds (flattens) the replica dimension into the batch dimension, and calls torch's
function only once. Folding the replicas into the batch is correct only if the result of a sample
does not depend on other samples.

In training batch norms, the result of a sample depends on the whole batch. Therefore a batch norm's
replica dimension is folded into the channel dimension, to [micro-batch, replicas x channels, ...].
Folding the replicas into the channels does not copy a tensor if the memory order of the tensor is
[micro-batch, replicas, channels, ...]. In this memory order, a sample's replicas are side by side.
Therefore the replacements of torch functions keep the memory order [micro-batch, replicas,
channels, ...] after a batch norm. Python code can see the memory order of a tensor only in the
strides of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from popdist_py.poptorch.execution.replica_order import are_side_by_side, replicas_first
from popdist_py.poptorch.group_norms.batch_norm import replicas_as_channels
from popdist_py.poptorch.tracing.losses import current_losses

__all__ = ["folded_batches", "folded_now"]

_functorch: Any = torch._C._functorch


@contextmanager
def folded_batches() -> Iterator[None]:
    """Replace attention, norms, losses and recurrent layers by functions that fold the replicas.

    The context manager also disables torch's warning about operations that ``vmap`` vectorises
    slowly. A program that does not call ``vmap`` itself should not get the warning that an
    operation is slow inside ``vmap``. Torch does not provide a function to read whether the warning
    about slow operations was enabled. Therefore the warning is always enabled at the end of the
    ``with`` block.
    """
    _functorch._set_vmap_fallback_warning_enabled(False)
    for place, name, _, folding in _FOLDINGS:
        setattr(place, name, folding)
    _active.update(_BY_FUNCTION)
    try:
        yield
    finally:
        _active.clear()
        for place, name, function, _ in _FOLDINGS:
            setattr(place, name, function)
        _functorch._set_vmap_fallback_warning_enabled(True)


def folded_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement that ``folded_batches`` has activated for a torch function.

    If ``function`` does not have an active replacement, the result is ``function`` itself.
    """
    return _active.get(function, function)


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(_functorch.is_batchedtensor(value))


def _folding(
    function: Callable[..., Any], dims: Sequence[int], unless: Callable[..., bool] | None = None
) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that folds the replicas of its leading arguments.

    Args:
        function: One of torch's functions.
        dims: For each leading argument, the index of the argument's batch dimension.
        unless: A function that gets all arguments of a call. If ``unless`` returns True,
            ``function`` is called without folding.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leading, rest = args[: len(dims)], args[len(dims) :]
        others = [*rest, *kwargs.values()]
        if not any(map(_is_batched, leading)) or any(map(_is_batched, others)):
            return function(*args, **kwargs)
        if unless is not None and unless(*args, **kwargs):
            return function(*args, **kwargs)
        size, side_by_side = _batch_size(leading), _are_side_by_side(leading[0], dims[0])
        plain = [
            _fold(value, dim, size, side_by_side) for value, dim in zip(leading, dims, strict=True)
        ]
        return _unfolded(partial(function, *plain, *rest, **kwargs), size, side_by_side)

    return run


def _unfolded(run: Callable[[], Any], size: int, side_by_side: bool) -> Any:
    """Run a function with folded tensors, and split the replica dimension off its results.

    Args:
        run: A function without arguments, which computes the folded results.
        size: The number of replicas.
        side_by_side: Whether the memory of the folded tensors contains one sample of every replica,
            then the next sample of every replica, and so on.
    """
    level = _functorch.maybe_current_level()
    with temporarily_pop_interpreter_stack():
        result = run()
        results = (result,) if isinstance(result, torch.Tensor) else result
        parts = [_split(part, size, side_by_side) for part in results]
    unfolded = [_functorch._add_batch_dim(part, 0, level) for part in parts]
    return unfolded[0] if isinstance(result, torch.Tensor) else tuple(unfolded)


def _split(fresh: torch.Tensor, size: int, side_by_side: bool) -> torch.Tensor:
    """Split the first dimension of a folded result into [replicas, batch, ...].

    Autograd does not treat the returned tensor as a view.
    """
    each, *rest = fresh.shape
    if side_by_side:
        return replicas_first(fresh, [each // size, size, *rest])
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(fresh, [size, each // size, *rest])
    return result


def _is_one_image(image: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Tell whether ``image`` does not have four dimensions: batch, channels, height and width."""
    return image.dim() != 4


def _drops_out(*args: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Tell whether a call of the attention function applies dropout.

    The replicas cannot be folded into the batch for dropout, because each replica draws numbers
    from a separate random stream.
    """
    return bool(args[4] if len(args) > 4 else dropout_p)


def _folding_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a classification loss that reduces each replica's losses alone."""

    def run(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        settings = dict(kwargs)
        reduction = settings.pop("reduction", "mean")
        ignored = settings.pop("ignore_index", -100)
        is_plain = not args and all(map(_is_off, settings.values()))
        is_foldable = reduction in ("none", "sum", "mean") and is_plain
        if not is_foldable or not (_is_batched(input) and _is_batched(target)):
            return function(input, target, *args, **kwargs)
        if input.dim() < 2 or target.is_floating_point():
            return function(input, target, *args, **kwargs)
        size = _batch_size([input])
        scores, classes = _fold(input, 0, size), _fold(target, 0, size)
        level = _functorch.maybe_current_level()
        # Only the reduced loss of each replica (the mean or sum over its samples) is a loss of the
        # model. Therefore torch function modes must not record the losses of single samples.
        with temporarily_pop_interpreter_stack(), torch._C.DisableTorchFunction():
            losses = function(scores, classes, ignore_index=ignored, reduction="none")
            result = losses.unflatten(0, (size, -1))
            if reduction != "none":
                result = result.flatten(1).sum(1)
            if reduction == "mean":
                result = result / (classes != ignored).view(size, -1).sum(1)
        loss: torch.Tensor = _functorch._add_batch_dim(result, 0, level)
        followed = current_losses()
        if followed is not None:
            followed.record(loss, (input, target))
        return loss

    return run


def _is_off(setting: Any) -> bool:
    """Tell whether an optional argument of a loss function is false, None or 0."""
    return not (isinstance(setting, torch.Tensor) or setting)


def _folding_recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of an LSTM or GRU function that folds the replicas into the batch.

    Dimension 1 of the hidden states of an LSTM or GRU is the batch dimension.
    """

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


def _folding_batch_norm(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of torch's batch norm that computes separate statistics for each replica.

    In evaluation mode, a batch norm uses given statistics, so a sample's result does not depend on
    other samples. Therefore the replicas are folded into the batch in evaluation mode.
    """

    def run(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        statistics, affine = (running_mean, running_var), (weight, bias)
        rest = (*statistics, *affine, training, momentum, eps)
        if not (_is_batched(input) and _have_format(input.dtype, *statistics, *affine)):
            # The mode ``MixedPrecision`` casts float16 samples to float32, and then calls ``run``
            # again.
            return function(input, *rest)
        if not training and not any(map(_is_batched, (*statistics, *affine))):
            size, side_by_side = _batch_size([input]), _are_side_by_side(input, 0)
            samples = _fold(input, 0, size, side_by_side)
            return _unfolded(partial(function, samples, *rest), size, side_by_side)
        if not training or not _are_own(statistics) or any(map(_is_batched, affine)):
            return function(input, *rest)
        size, level = _batch_size([input]), _functorch.maybe_current_level()
        samples = _fold(input, 1, size)
        own = [None if value is None else _replicas_first(value).view(-1) for value in statistics]
        with temporarily_pop_interpreter_stack(), replicas_as_channels(size):
            repeated = [None if value is None else value.repeat(size) for value in affine]
            result = function(samples, *own, *repeated, training, momentum, eps)
            batch, _, *rest = result.shape
            result = replicas_first(result, [batch, size, -1, *rest])
        return _functorch._add_batch_dim(result, 0, level)

    return run


def _folding_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``Tensor.__mul__`` that keeps the memory order of the larger operand.

    Torch's own multiplication would use the memory order of the first operand, even if the first
    operand has only one number for each channel.
    """

    def run(left: Any, right: Any) -> Any:
        if _is_batched(left) and _is_batched(right) and left.numel() < right.numel():
            left, right = right, left
        return function(left, right)

    return run


def _folding_view(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``Tensor.view`` that accepts tensors with replicas side by side.

    A tensor has the replicas side by side if it stores the first sample of every replica, then the
    second sample of every replica, and so on.

    If torch cannot view the tensor because of its memory order, the result is a view of a copy of
    the tensor. An in-place change of the copy's view does not change the original tensor. A model
    that needs the change of the original tensor then has other results than with the reference back
    end ``LoopReplicas``, which runs one replica after the other. The comparison of the back ends
    detects the difference.
    """

    def run(tensor: Any, *shape: Any, **kwargs: Any) -> Any:
        try:
            return function(tensor, *shape, **kwargs)
        except RuntimeError:
            if not (_is_batched(tensor) and _are_side_by_side(tensor, 0)):
                raise
            return function(tensor.clone(memory_format=torch.contiguous_format), *shape, **kwargs)

    return run


def _have_format(dtype: torch.dtype, *tensors: Any) -> bool:
    """Tell whether torch's batch norm accepts ``tensors`` for samples of the given dtype.

    A tensor may be None.
    """
    return dtype in (torch.float32, torch.float64) and all(
        tensor is None or tensor.dtype == dtype for tensor in tensors
    )


def _are_own(statistics: Sequence[Any]) -> bool:
    """Tell whether each replica has its own batch norm statistics, or no statistics exist."""
    return all(map(_is_batched, statistics)) or all(value is None for value in statistics)


def _batch_size(values: Sequence[Any]) -> int:
    """Return the number of replicas, which is the size of the dimension that ``vmap`` maps over."""
    batched = next(value for value in values if _is_batched(value))
    plain = _functorch.get_unwrapped(batched)
    return int(plain.shape[_functorch.maybe_get_bdim(batched)])


def _replicas_first(value: torch.Tensor) -> torch.Tensor:
    """Convert a batched tensor of ``vmap`` to a plain tensor of the shape [replicas, ...]."""
    at = _functorch.maybe_get_bdim(value)
    with temporarily_pop_interpreter_stack():
        first: torch.Tensor = _functorch.get_unwrapped(value).movedim(at, 0)
        return first


def _are_side_by_side(value: torch.Tensor, dim: int) -> bool:
    """Tell whether the memory order of a batched tensor is [batch, replicas, ...].

    Args:
        value: The tensor. The result is False if the tensor is not batched over the replicas.
        dim: The index of the batch dimension in each replica's tensor.
    """
    if not _is_batched(value):
        return False
    at = _functorch.maybe_get_bdim(value)
    return are_side_by_side(_functorch.get_unwrapped(value), at, dim + (at <= dim))


def _fold(value: torch.Tensor, dim: int, size: int, side_by_side: bool = False) -> torch.Tensor:
    """Return a plain tensor whose dimension ``dim`` contains the samples of all replicas.

    Args:
        value: A tensor that ``vmap`` batches over the replicas, or a plain tensor that all replicas
            share.
        dim: The dimension of each replica's tensor, usually the batch dimension.
        size: The number of replicas.
        side_by_side: Whether the folded dimension has the order [``dim``, replicas] instead of
            [replicas, ``dim``].
    """
    if _is_batched(value):
        at = _functorch.maybe_get_bdim(value)
        plain = _functorch.get_unwrapped(value)
    else:
        at, plain = 0, value
    with temporarily_pop_interpreter_stack():
        if not _is_batched(value):
            plain = plain.unsqueeze(0).expand(size, *plain.shape)
        together: torch.Tensor = plain.movedim(at, dim + side_by_side).flatten(dim, dim + 1)
        return together


def _foldings() -> list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]]:
    """Return (module or class, name, function, replacement) for each torch function to replace."""
    of_images = partial(_folding, dims=(0,), unless=_is_one_image)
    makers: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (F, "scaled_dot_product_attention", partial(_folding, dims=(0, 0, 0), unless=_drops_out)),
        (F, "group_norm", partial(_folding, dims=(0,))),
        (F, "conv2d", of_images),
        (F, "max_pool2d", of_images),
        (F, "avg_pool2d", of_images),
        (F, "batch_norm", _folding_batch_norm),
        (F, "cross_entropy", _folding_loss),
        (F, "nll_loss", _folding_loss),
        (torch.Tensor, "view", _folding_view),
        (torch.Tensor, "__mul__", _folding_product),
        (torch._VF, "gru", _folding_recurrent),
        (torch._VF, "lstm", _folding_recurrent),
    )
    found = []
    for place, name, folding in makers:
        function = getattr(place, name)
        found.append((place, name, function, folding(_in_its_place(place, name, function))))
    return found


def _in_its_place(place: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that puts torch's own ``function`` back while ``function`` runs.

    A torch function such as ``F.conv2d`` reads the attribute ``conv2d`` of its own module, and
    passes the attribute's value to torch function modes. The torch function modes must get torch's
    own function, and not the replacement of the function.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        folding = getattr(place, name)
        setattr(place, name, function)
        try:
            return function(*args, **kwargs)
        finally:
            setattr(place, name, folding)

    return run


_FOLDINGS: Final = _foldings()
_BY_FUNCTION: Final = {function: folding for _, _, function, folding in _FOLDINGS}
_active: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
