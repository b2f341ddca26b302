"""The buckets of DistributedDataParallel, moved to memory that the ranks of a host share.

Its reducer allocates them in C++ and hands them to ``allreduce`` within backward. In the first such
call of a bucket the storage gets other memory in place: all views of it stay, and from then on the
bucket is reduced where it lies.

Such a program allocates as much for gradients in every step: from the first bucket on, the memory
that it frees is kept for the next one.

Nothing here communicates, or decides whether the ranks move a bucket: that is the communicator's
matter, where all of them agree. It never moves a tensor that a program itself has passed, nor one
of which there is a NumPy array: that would keep the memory of before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.freed_memory import keep_freed_memory

__all__ = ["mover_of"]

# Set once: a program may set its own afterwards.
_keep_freed_memory = functools.cache(keep_freed_memory)
# What Python runs while C++ runs backward. A program's own call, in a hook of its own too, comes
# through a function of torch.distributed.
_BACKWARD = "_engine_run_backward"
_OWN = __name__.rpartition(".")[0]


def mover_of(tensors: Sequence[torch.Tensor]) -> Callable[[Array], None] | None:
    """Return what moves a bucket of DistributedDataParallel; None if the tensors are no bucket.

    To be called while torch.distributed calls a method of ours.

    Returns:
        A function that takes as many bytes of other memory, copies the bucket there, and makes it
        the bucket's own. Arrays made of the bucket before are invalid then.
    """
    if len(tensors) != 1 or _caller() != _BACKWARD:
        return None
    _keep_freed_memory()
    (bucket,) = tensors
    storage = bucket.untyped_storage()
    is_whole = bucket.is_contiguous() and bucket.nbytes == storage.nbytes()
    # ``tensor.numpy()`` fixes the size of the storage: gradients may be views of the bucket.
    is_ours_alone = storage.resizable()
    # An older PyTorch cannot.
    if not (is_whole and is_ours_alone and hasattr(storage, "_swap_data_ptr_")):
        return None

    def move(memory: Array) -> None:
        moved = torch.from_numpy(memory).untyped_storage()
        moved.copy_(storage)
        storage._swap_data_ptr_(moved)

    return move


def _caller() -> str:
    """Return the name of the function that called this back end; "" in a thread of C++."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_name if frame is not None else ""
