"""The buckets of DistributedDataParallel, moved to memory that the ranks of a host share.

Its reducer allocates them in C++ and hands them to ``allreduce`` within backward. In the first such
call of a bucket the storage gets other memory in place: all views of it stay, and from then on the
bucket is reduced where it lies.

Nothing here communicates, or decides whether the ranks move a bucket: that is the communicator's
matter, where all of them agree. It never moves a tensor that a program itself has passed, nor one
of which there is a NumPy array: that would keep the memory of before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from popdist_py.collectives.arithmetic import Array

__all__ = ["mover_of"]

# What Python runs while C++ runs backward. A program's own call, in a hook of its own too, comes
# through a function of torch.distributed.
_BACKWARD = "_engine_run_backward"
_OURS = ("popdist_py.torch_backend.process_group", "popdist_py.torch_backend.overloads")


def mover_of(tensors: Sequence[torch.Tensor]) -> Callable[[Array], None] | None:
    """Return what moves a bucket of DistributedDataParallel; None if the tensors are no bucket.

    To be called by the method that torch.distributed calls, which may lie behind others of ours.

    Returns:
        A function that takes as many bytes of other memory, copies the bucket there, and makes it
        the bucket's own. Arrays made of the bucket before are invalid then.
    """
    caller = sys._getframe(1).f_back
    while caller is not None and caller.f_globals.get("__name__") in _OURS:
        caller = caller.f_back  # None in a thread of C++
    if caller is None or caller.f_code.co_name != _BACKWARD or len(tensors) != 1:
        return None
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
