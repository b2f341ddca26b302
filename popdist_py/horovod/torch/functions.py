"""One start for all ranks: parameters, the state of optimizers, and objects of the root.

Nothing here reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from popdist_py import activities
from popdist_py.horovod.torch.basics import (
    ProcessSet,
    check_process_set,
    communicator,
    global_process_set,
)
from popdist_py.horovod.torch.calls import check_optimizer, is_root
from popdist_py.horovod.torch.errors import horovod_errors
from popdist_py.horovod.torch.mpi_ops import broadcast_async_, synchronize

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the parameters of all ranks with those of rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors.
        root_rank: whose parameters are sent.
        process_set: must be the global one.

    Raises:
        ValueError: ``params`` is something else, or there is no such rank.
        CollectiveMismatchError: the ranks differ in names, shapes or dtypes.
    """
    check_process_set(process_set)
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"broadcast_parameters({type(params).__name__}): invalid params; expected "
            "model.state_dict(), model.named_parameters() or a list of tensors"
        )
    handles = [broadcast_async_(p, root_rank, name) for name, p in named if p is not None]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizers of all ranks the state and options of that of rank ``root_rank``.

    An optimizer that has made no step yet gets the state as well. As with Horovod, its parameters
    without gradients have gradients of zeros afterwards.

    Args:
        optimizer: of equal parameter groups on all ranks.
        root_rank: whose state is sent.
        model: has no meaning here.
        process_set: must be the global one.

    Raises:
        ValueError: an LBFGS, whose state Horovod does not send either.
        TypeError: it is no optimizer.
    """
    check_optimizer("broadcast_optimizer_state", optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _add_gradients(optimizer)
    # One pickle: no rank but the root knows which tensors there are.
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer", process_set)
    if not is_root("broadcast_optimizer_state", root_rank):
        optimizer.load_state_dict(state)


def _add_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter a gradient, as programs may use it before the first backward pass."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                parameter.grad = zeros.to_sparse() if is_sparse else zeros


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank ``root_rank``.

    Args:
        obj: anything that can be pickled.
        root_rank: whose object is sent.
        name: compared between the ranks.
        process_set: must be the global one.

    Raises:
        ValueError: there is no such rank.
        TypeError: the object cannot be pickled; on every rank.
    """
    check_process_set(process_set)
    is_root("broadcast_object", root_rank)
    with horovod_errors(), activities.doing(activities.REDUCING, "broadcast_object"):
        return communicator().broadcast_object(obj, root_rank, name or "")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in their order.

    Args:
        obj: anything that can be pickled.
        name: compared between the ranks.
        process_set: must be the global one.
    """
    check_process_set(process_set)
    with horovod_errors(), activities.doing(activities.REDUCING, "all_gather_object"):
        return communicator().all_gather_object(obj, name or "")
