"""Moves buckets of DistributedDataParallel to memory that the ranks of a host share.

The reducer of DistributedDataParallel allocates its buckets in C++ and passes them to ``allreduce``
during the backward pass. The first ``allreduce`` of a bucket replaces the memory of the bucket's
storage. All views of the storage remain valid, and later calls reduce the bucket in place.

A program that uses DistributedDataParallel allocates equally large gradients in every step.
So, from the first bucket on, the process keeps the memory that it frees for the next step.

The communicator decides whether a bucket is moved, because all ranks must make the same decision. A
tensor that the program itself passes to ``allreduce`` is never moved. A tensor that shares its
memory with a NumPy array is not moved either, because the array would keep the old memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.freed_memory import keep_freed_memory

__all__ = ["mover_of"]

# The setting is changed only at the first call, because the program may change it afterwards.
_keep_freed_memory = functools.cache(keep_freed_memory)
# The name of the Python function that waits while C++ runs the backward pass. If
# DistributedDataParallel makes a call, this function is the caller of the back end. If the program
# itself makes a call, even in a hook, the caller is a function of torch.distributed.
_BACKWARD = "_engine_run_backward"
_OWN = __name__.rpartition(".")[0]


def mover_of(tensors: Sequence[torch.Tensor]) -> Callable[[Array], None] | None:
    """Return a function that moves a bucket of DistributedDataParallel to other memory.

    The method of the process group that torch.distributed calls must call ``mover_of`` directly.

    Returns:
        None if the tensors are not a bucket. Otherwise a function that gets memory of the bucket's
        size, copies the bucket to this memory, and makes it the memory of the bucket's storage.
        After a call of this function, NumPy arrays that share the old memory of the bucket are
        invalid.
    """
    if len(tensors) != 1 or _caller() != _BACKWARD:
        return None
    _keep_freed_memory()
    (bucket,) = tensors
    storage = bucket.untyped_storage()
    is_whole = bucket.is_contiguous() and bucket.nbytes == storage.nbytes()
    # A gradient may be a view of the bucket. If the program calls ``numpy()`` on such a gradient,
    # torch makes the storage not resizable.
    is_ours_alone = storage.resizable()
    # The method ``_swap_data_ptr_`` is missing in older versions of PyTorch.
    if not (is_whole and is_ours_alone and hasattr(storage, "_swap_data_ptr_")):
        return None

    def move(memory: Array) -> None:
        moved = torch.from_numpy(memory).untyped_storage()
        moved.copy_(storage)
        storage._swap_data_ptr_(moved)

    return move


def _caller() -> str:
    """Return the name of the Python function that called this back end; "" in a C++ thread."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_name if frame is not None else ""
