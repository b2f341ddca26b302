"""The places between operations where a stage may begin, and the tensors that cross a place.

The number of a place between two operations is the number of the operation after the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from popdist_py.ipu.graph import Graph

__all__ = ["cheap_places", "crossing_bytes", "lives", "places_to_cut", "with_checkpoints"]


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
    wanted = set(places)
    marked: set[str] = set()
    # For each root, the name of the last operation before the current place that writes it.
    writers: dict[str, str] = {}
    for place, crossing in _crossings(graph):
        writer = graph.operations[place - 1]
        writers[graph.root_of[writer.output.name]] = writer.name
        if place in wanted:
            marked.update(writers[root] for root in crossing)
    return replace(
        graph,
        operations=tuple(
            replace(o, is_checkpoint=o.is_checkpoint or o.name in marked) for o in graph.operations
        ),
    )


def crossing_bytes(graph: Graph, *, is_training: bool) -> list[int]:
    """Return, for each place, the bytes that IPUs copy if a stage begins there.

    The copies of a training run are the tensors that cross the place, and the gradients of those
    tensors that have one. The returned list has one entry for each operation, and one for the end
    of the model.
    """
    changes = [0] * (len(graph.operations) + 2)
    for root, (first, last) in lives(graph).items():
        size = graph.root_bytes[root]
        copied = 2 * size if is_training and root in graph.gradient_roots else size
        changes[first + 1] += copied
        changes[last + 1] -= copied
    return list(accumulate(changes))[:-1]


def cheap_places(graph: Graph) -> tuple[int, ...]:
    """Return the places that few bytes cross, such as the places between the layers of a model.

    A tensor that all layers read, such as an attention mask, crosses all of these places.
    """
    crossing = crossing_bytes(graph, is_training=False)[1:-1]
    if not crossing:
        return ()
    few = sorted(crossing)[len(crossing) // 10]
    return tuple(place for place, size in enumerate(crossing, 1) if 0 < size <= 1.05 * few)


def lives(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return, for each tensor that a later operation reads, its first writer and last reader.

    Tensors are given by the names of their roots (the tensors that own the memory), and operations
    by their numbers. Input tensors are left out, because every stage may receive inputs from the
    host.
    """
    last = {graph.root_of[n]: i for i, o in enumerate(graph.operations) for n in o.inputs}
    found: dict[str, tuple[int, int]] = {}
    inputs = {tensor.name for tensor in graph.inputs}
    for index, operation in enumerate(graph.operations):
        root = graph.root_of[operation.output.name]
        if root not in inputs and root not in found and last.get(root, -1) > index:
            found[root] = index, last[root]
    return found


def _crossings(graph: Graph) -> Iterator[tuple[int, Set[str]]]:
    """Yield each place between two operations, with the earlier tensors that are read after it.

    A tensor crosses a place if an operation before the place computes it and a later operation
    reads it. Crossing tensors are given by the names of their roots (the tensors that own the
    memory).

    The crossing tensors do not include input tensors from the host, because every stage may receive
    inputs from the host. The function yields the same set for all places, which changes when the
    caller requests the next place.
    """
    beginning: dict[int, list[str]] = {}
    ending: dict[int, list[str]] = {}
    for root, (first, last) in lives(graph).items():
        beginning.setdefault(first, []).append(root)
        ending.setdefault(last, []).append(root)
    crossing: set[str] = set()
    for place in range(1, len(graph.operations)):
        crossing.update(beginning.get(place - 1, ()))
        crossing.difference_update(ending.get(place - 1, ()))
        yield place, crossing
