"""The calls of torch.distributed on arrays: each a function over the communicator of a group.

Nothing here knows tensors, threads or time-outs.
"""

from __future__ import annotations

from collections.abc import Sequence

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.communicators.shared_memory import SharedCommunicator

__all__ = ["all_gather", "all_to_all", "gather", "reduce", "reduce_scatter", "scatter"]


def reduce(comm: SharedCommunicator, array: Array, op: str, root: int) -> None:
    """Reduce ``array`` in place at ``root``; the others keep theirs."""
    comm.reduce_to(array, op, root)  # type: ignore[arg-type]


def all_gather(comm: SharedCommunicator, array: Array, outputs: Sequence[Array]) -> None:
    """Fill output i with the array of rank i."""
    comm.all_gather_into(array, outputs)


def gather(comm: SharedCommunicator, array: Array, outputs: Sequence[Array], root: int) -> None:
    """Fill output i of rank ``root`` with the array of rank i."""
    comm.gather_into(array, outputs if comm.instance_index == root else (), root)


def scatter(comm: SharedCommunicator, inputs: Sequence[Array], output: Array, root: int) -> None:
    """Fill the output of rank i with input i of rank ``root``."""
    comm.scatter_into(inputs if comm.instance_index == root else (), output, root)


def reduce_scatter(comm: SharedCommunicator, inputs: Array, output: Array, op: str) -> None:
    """Fill the output of rank i with the reduction of row i of ``inputs`` of all ranks."""
    comm.reduce_scatter_into(inputs, output, op)  # type: ignore[arg-type]


def all_to_all(comm: SharedCommunicator, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Fill output i with what rank i has as input for this rank."""
    comm.all_to_all_into(inputs, outputs)
