"""The sum of sparse tensors over all ranks. The ranks' tensors may have different indices."""

from __future__ import annotations

import numpy as np
import torch

from popdist_py.collectives.communicators.group_communicator import GroupCommunicator
from popdist_py.torch_backend.tensors import array_of

__all__ = ["add_up"]


def add_up(comm: GroupCommunicator, tensor: torch.Tensor) -> None:
    """Overwrite a sparse tensor with the sum over all ranks. All ranks must call this function."""
    own = tensor.detach().coalesce()
    name = f"sparse {tuple(own.shape)}"
    counts = comm.all_gather(np.array([len(own.values())]), name)[:, 0].tolist()
    indices: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for root, count in enumerate(counts):
        index, value = own.indices(), own.values()
        if root != comm.instance_index:
            index = index.new_empty((len(index), count))
            value = value.new_empty((count, *value.shape[1:]))
        for part, parts in ((index, indices), (value, values)):
            comm.broadcast(array_of(part), root, name)
            parts.append(part)
    total = torch.sparse_coo_tensor(
        torch.cat(indices, dim=1),
        torch.cat(values),
        own.shape,
        device="cpu",
        check_invariants=False,  # each rank's tensor was checked already
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())
