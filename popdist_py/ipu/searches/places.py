"""The places between operations where a stage may begin, and the tensors that cross a place.

The number of a place between two operations is the number of the operation after the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from popdist_py.ipu.graph import Graph

__all__ = ["places_to_cut", "with_checkpoints"]


def places_to_cut(graph: Graph) -> tuple[int, ...]:
    """Return the places between operations that only one tensor crosses.

    A place (a possible beginning of a stage) lies between two consecutive operations. The number of
    a place (a possible beginning of a stage between two operations) is the number of the operation
    after the place.
    """
    return tuple(index for index, crossing in _crossings(graph) if len(crossing) == 1)


def with_checkpoints(graph: Graph, places: Sequence[int]) -> Graph:
    """Return a graph that keeps the tensors at the given places as recomputation checkpoints.

    A tensor is at a place if an operation before the place computes it and a later operation reads
    it.
    """
    wanted = dict(_crossings(graph))
    marked = set()
    for place in places:
        for root in wanted[place]:
            writers = (o for o in graph.operations[:place] if graph.root_of[o.output.name] == root)
            marked |= {operation.name for operation in list(writers)[-1:]}
    return replace(
        graph,
        operations=tuple(
            replace(o, is_checkpoint=o.is_checkpoint or o.name in marked) for o in graph.operations
        ),
    )


def _crossings(graph: Graph) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield each place between two operations, with the earlier tensors that are read after it.

    A tensor crosses a place if an operation before the place computes it and a later operation
    reads it. The function gives the crossing tensors as the names of their roots (the tensors that
    own the memory).

    The number of a place (a possible beginning of a stage between two operations) is the number of
    the operation after the place. The crossing tensors do not include input tensors from the host,
    because every stage may receive inputs from the host.
    """
    last = {graph.root_of[n]: i for i, o in enumerate(graph.operations) for n in o.inputs}
    inputs = {tensor.name for tensor in graph.inputs}
    made: set[str] = set()
    for index, operation in enumerate(graph.operations):
        if index:
            yield index, frozenset(root for root in made if last.get(root, -1) >= index)
        made.add(graph.root_of[operation.output.name])
        made -= inputs
