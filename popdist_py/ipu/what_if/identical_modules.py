"""Search for identical submodules of a model, which could share their weights.

A program can call one of several identical submodules several times, and leave out the others. The
IPU then stores their weights only once. The Python module ``identical_modules`` does not compute
the memory that sharing saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from popdist_py.ipu.graph import Graph, Operation, Placement, Weight

__all__ = ["Reuse", "reused"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """A copy of a model's graph in which identical submodules share their weights.

    Attributes:
        graph: A graph with the same operations as the graph without sharing, and with fewer
            weights.
        kept: The name of the submodule that is called most often, because its weights are shared by
            most submodules.
        calls: The number of calls of the submodule ``kept`` in one forward pass.
    """

    graph: Graph
    kept: str
    calls: int


def reused(graph: Graph, placement: Placement) -> Reuse | None:
    """Return a graph whose identical submodules share weights; None if no two are identical.

    Two submodules are identical if both are numbered members of one module (``layers.3``), both are
    in the same pipeline stage, and both have operations and weights of equal sizes. If identical
    submodules contain other identical submodules, the outer submodules share their weights.
    """
    shared: dict[str, str] = {}
    best: tuple[int, str] = (1, "")
    for group in _groups(graph, placement):
        first, *others = (_weights(operations) for _, operations in group)
        taken = shared.keys() | set(shared.values())
        if not first or not taken.isdisjoint(first):
            continue
        calls = 1
        for own in others:
            if taken.isdisjoint(own) and set(first).isdisjoint(own):
                shared |= dict(zip(own, first, strict=True))
                calls += 1
        if calls > best[0]:
            best = calls, group[0][0]
    if not shared:
        return None
    operations = tuple(
        replace(o, weights=tuple(shared.get(name, name) for name in o.weights))
        for o in graph.operations
    )
    weights = tuple(weight for weight in graph.weights if weight.name not in shared)
    return Reuse(replace(graph, operations=operations, weights=weights), best[1], best[0])


# The name of a submodule of the model, and the operations of that submodule.
_Module = tuple[str, Sequence[Operation]]


def _groups(graph: Graph, placement: Placement) -> Iterator[list[_Module]]:
    """Yield groups of identical submodules, with outer submodules before inner submodules."""
    modules: dict[str, list[Operation]] = {}
    stages: dict[str, set[int]] = {}
    for operation, stage in zip(graph.operations, placement.stages, strict=True):
        parts = operation.name.split(".")
        for depth, part in enumerate(parts, 1):
            if part.isdecimal():
                name = ".".join(parts[:depth])
                modules.setdefault(name, []).append(operation)
                stages.setdefault(name, set()).add(stage)
    groups: dict[tuple[object, ...], list[_Module]] = {}
    for name, operations in modules.items():
        if len(stages[name]) == 1:
            shapes = tuple(_shape(graph, operation, len(name)) for operation in operations)
            key = name.rpartition(".")[0], *stages[name], shapes
            groups.setdefault(key, []).append((name, operations))
    several = (group for group in groups.values() if len(group) > 1)
    return iter(sorted(several, key=lambda group: group[0][0].count(".")))


def _shape(graph: Graph, operation: Operation, start: int) -> tuple[object, ...]:
    """Return the properties of an operation that have to be equal in identical submodules."""
    weights: list[Weight] = [graph.weight_of[name] for name in operation.weights]
    return (
        operation.name[start:],
        operation.kind,
        operation.product,
        tuple(graph.tensors[name].elements for name in operation.inputs),
        (operation.output.elements, operation.output.type),
        tuple((weight.elements, weight.type, weight.is_trained) for weight in weights),
    )


def _weights(operations: Sequence[Operation]) -> list[str]:
    return list(dict.fromkeys(name for operation in operations for name in operation.weights))
