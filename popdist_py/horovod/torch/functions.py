"""Functions that broadcast parameters, optimizer states and objects, and that gather objects."""

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
from popdist_py.horovod.torch.broadcast_ops import broadcast_async_
from popdist_py.horovod.torch.calls import check_optimizer, is_root
from popdist_py.horovod.torch.errors import horovod_errors

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
    """Overwrite the parameters of all ranks with the parameters of rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or a list of tensors.
        root_rank: The rank whose parameters are sent to all ranks.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: ``params`` does not have one of these types, or ``root_rank`` is not a rank of
            the job.
        CollectiveMismatchError: The ranks passed different names, shapes or dtypes.
    """
    check_process_set(process_set)
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"broadcast_parameters: invalid params of type {type(params).__name__}: expected "
            "model.state_dict(), model.named_parameters() or a list of tensors"
        )
    handles = [broadcast_async_(p, root_rank, name) for name, p in named if p is not None]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> None:
    """Send the optimizer state and options of rank ``root_rank`` to the optimizers of all ranks.

    The function also works if the optimizer has not made a step yet. For an optimizer without any
    state, the function sets missing gradients of the parameters to zeros, as Horovod does.

    Args:
        optimizer: An optimizer with the same parameter groups on all ranks.
        root_rank: The rank whose optimizer state is sent to all ranks.
        model: This argument is ignored.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: The optimizer is an instance of LBFGS, which Horovod rejects too.
        TypeError: ``optimizer`` is not a torch optimizer.
    """
    check_optimizer("broadcast_optimizer_state", optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _add_gradients(optimizer)
    # The state is sent as one pickle, because only the root knows which tensors the state contains.
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer", process_set)
    if not is_root("broadcast_optimizer_state", root_rank):
        optimizer.load_state_dict(state)


def _add_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set missing gradients to zeros, because programs may use them before a backward pass."""
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
        obj: An object that ``pickle`` accepts.
        root_rank: The rank whose object is sent to all ranks.
        name: All ranks must pass the same name.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: ``root_rank`` is not a rank of the job.
        TypeError: ``pickle`` does not accept the object of rank ``root_rank``. All ranks raise this
            error.
    """
    check_process_set(process_set)
    is_root("broadcast_object", root_rank)
    with horovod_errors(), activities.doing(activities.REDUCING, "broadcast_object"):
        return communicator().broadcast_object(obj, root_rank, name or "")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks in rank order.

    Args:
        obj: An object that ``pickle`` accepts.
        name: All ranks must pass the same name.
        process_set: Only ``global_process_set`` is accepted.
    """
    check_process_set(process_set)
    with horovod_errors(), activities.doing(activities.REDUCING, "all_gather_object"):
        return communicator().all_gather_object(obj, name or "")
