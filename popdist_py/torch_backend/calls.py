"""The calls of torch.distributed on arrays: each a function over the communicator of a group.

Nothing here knows tensors, threads or time-outs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.communicators.shared_memory import SharedCommunicator

__all__ = ["all_gather", "all_to_all", "gather", "reduce", "reduce_scatter", "scatter"]


def reduce(comm: SharedCommunicator, array: Array, op: str, root: int) -> None:
    """Reduce ``array`` in place at ``root``; the others keep theirs."""
    own = array if comm.instance_index == root else array.copy()
    comm.all_reduce(own, op, f"to {root}")  # type: ignore[arg-type]


def all_gather(comm: SharedCommunicator, array: Array, outputs: Sequence[Array]) -> None:
    """Fill output i with the array of rank i."""
    for output, row in zip(outputs, comm.all_gather(array), strict=True):
        output.reshape(-1)[...] = row.reshape(-1)


def gather(comm: SharedCommunicator, array: Array, outputs: Sequence[Array], root: int) -> None:
    """Fill output i of rank ``root`` with the array of rank i."""
    rows = comm.gather(array, root)
    if rows is not None:
        for output, row in zip(outputs, rows, strict=True):
            output[...] = row


def scatter(comm: SharedCommunicator, inputs: Sequence[Array], output: Array, root: int) -> None:
    """Fill the output of rank i with input i of rank ``root``."""
    size = comm.num_instances
    everything = np.stack(inputs) if inputs else np.empty((size, *output.shape), output.dtype)
    comm.broadcast(everything, root, "scatter")
    output[...] = everything[comm.instance_index]


def reduce_scatter(comm: SharedCommunicator, inputs: Array, output: Array, op: str) -> None:
    """Fill the output of rank i with the reduction of row i of ``inputs`` of all ranks."""
    if comm.host_memory is not None:
        output[...] = comm.reduce_scatter(inputs, op).reshape(output.shape)  # type: ignore[arg-type]
    else:
        everything = inputs.copy()
        comm.all_reduce(everything, op, "scattered")  # type: ignore[arg-type]
        output[...] = everything[comm.instance_index].reshape(output.shape)


def all_to_all(comm: SharedCommunicator, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Fill output i with what rank i has as input for this rank."""
    rows = comm.all_gather_object(list(inputs))
    for output, arrays in zip(outputs, rows, strict=True):
        output.reshape(-1)[...] = arrays[comm.instance_index].reshape(-1)
