"""Moves buckets of DistributedDataParallel to memory that the ranks of a host share.

The reducer of DistributedDataParallel allocates its buckets in C++ and passes them to ``allreduce``
during the backward pass. The first ``allreduce`` of a bucket replaces the memory of the bucket's
storage by shared memory. All views of the storage remain valid. Later ``allreduce`` calls reduce
the bucket directly in the shared memory.

A program that uses DistributedDataParallel allocates and frees equally large gradients in every
step. Therefore, from the first bucket on, malloc keeps freed memory for the next step.

The communicator decides whether a bucket is moved, because all ranks must make the same decision. A
tensor that the program itself passes to ``allreduce`` is never moved. A tensor that shares its
memory with a NumPy array is not moved either, because the array would continue to use the old
memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.freed_memory import keep_freed_memory

__all__ = ["mover_of"]

# malloc's setting is changed only once. A second change could undo a later change by the program.
_keep_freed_memory = functools.cache(keep_freed_memory)
# The name of torch's Python function that waits while C++ code runs the backward pass. When
# DistributedDataParallel calls the back end, _engine_run_backward is the calling Python function.
# When the program itself makes a call, even in a hook, the caller is a function of
# torch.distributed.
_BACKWARD = "_engine_run_backward"
_OWN = __name__.rpartition(".")[0]


def mover_of(tensors: Sequence[torch.Tensor]) -> Callable[[Array], None] | None:
    """Return a function that moves a bucket of DistributedDataParallel to given memory.

    ``mover_of`` must run in the thread in which torch calls the process group, because it inspects
    the call stack of its thread.

    Returns:
        None if the tensors are not a bucket that can be moved. Otherwise a function whose argument
        is an array of the bucket's size. The function copies the bucket to the array, and then lets
        the bucket's storage use the array's memory. The function invalidates all NumPy arrays that
        share the bucket's old memory.
    """
    if len(tensors) != 1 or _caller() != _BACKWARD:
        return None
    _keep_freed_memory()
    (bucket,) = tensors
    storage = bucket.untyped_storage()
    is_whole = bucket.is_contiguous() and bucket.nbytes == storage.nbytes()
    # If the program calls ``numpy()`` on a gradient that is a view of the bucket, torch marks the
    # storage as not resizable.
    is_ours_alone = storage.resizable()
    # Older versions of torch lack the method ``_swap_data_ptr_``.
    if not (is_whole and is_ours_alone and hasattr(storage, "_swap_data_ptr_")):
        return None

    def move(memory: Array) -> None:
        moved = torch.from_numpy(memory).untyped_storage()
        moved.copy_(storage)
        storage._swap_data_ptr_(moved)

    return move


def _caller() -> str:
    """Return the name of the Python function that called this back end.

    The result is "" in a thread that C++ started.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_name if frame is not None else ""
