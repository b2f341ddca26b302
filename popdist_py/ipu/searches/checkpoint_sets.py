"""Sets of recomputation checkpoints, with the memory and the time of a run with each set.

More checkpoints take more memory and save the time for recomputing tensors. The curve consists of
the runs that no other run beats in both memory and time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Final, get_args

from popdist_py.ipu.graph import Graph
from popdist_py.ipu.memory_contents import Verdict, verdict_of
from popdist_py.ipu.searches.places import cheap_places, places_to_cut, with_checkpoints
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.settings import Recompute
from popdist_py.ipu.stage_cycles import operation_cycles

__all__ = ["RecomputationPoint", "recomputation_curve"]

# If at most this number of operations could be checkpoints, all sets of them are compared.
_FEW_OPERATIONS: Final = 10
# The largest number of sets that are compared for each set of checkpoints to begin with.
_SETS: Final = 16
# The largest number of sets that differ only by one operation, or by one group of operations, from
# a set of the curve.
_CHANGED_SETS: Final = 100
# The largest number of operations for which the changed sets differ by one operation.
_SINGLE_OPERATIONS: Final = 40
# For each kind of recomputation without additional checkpoints, the tensors that a run keeps.
_KEPT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "none": "everything",
        "norm": "everything but norms",
        "standard": "the checkpoints that PopART chooses",
    }
)


@dataclass(frozen=True, slots=True)
class RecomputationPoint:
    """A kind of recomputation with a set of checkpoints, and the memory and time of the run.

    Attributes:
        run: The run with this recomputation.
        share: The bytes that the fullest tile needs, divided by the memory of a tile.
        samples_per_second: The samples that all replicas together process in a second.
        checkpoints: The names of the operations that are checkpoints in addition to those of the
            user's program.
    """

    run: Run
    share: float
    samples_per_second: float
    checkpoints: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the run fits into memory, or is close to the limit."""
        return verdict_of(self.share)

    @property
    def kept(self) -> str:
        """A text that says which tensors the run keeps for the backward pass.

        Numbers in the names of operations are replaced by stars, so that equal operations of all
        layers have one name.
        """
        kind = self.run.settings.recompute
        if kind != "stage":
            return _KEPT.get(kind, kind)
        patterns: dict[str, int] = {}
        for name in self.checkpoints:
            patterns[_pattern(name)] = patterns.get(_pattern(name), 0) + 1
        parts = [f"{name} ({count})" if count > 1 else name for name, count in patterns.items()]
        return ", ".join(parts) or "inputs of stages and the program's own checkpoints"


def recomputation_curve(run: Run) -> tuple[RecomputationPoint, ...]:
    """Return the best kinds of recomputation and sets of checkpoints, with the fastest run first.

    Each following run needs less memory on its fullest tile and more time. No other run that the
    search compared needs at most as much memory and at most as much time. If the model has at most
    ten operations, the search compares all sets of checkpoints. In larger models, it compares
    checkpoints at regular distances, and adds the tensors whose recomputation takes the longest for
    their size. The search then changes the best sets by one operation, or by one group of
    operations.
    """
    found = _best(_point(run, other) for other in _candidates(run))
    if len(run.graph.operations) > _FEW_OPERATIONS:
        found = _with_changed_sets(run, found)
    return tuple(found)


def _best(points: Iterable[RecomputationPoint]) -> list[RecomputationPoint]:
    """Return the points that no other point beats in both memory and time, the fastest first."""
    found: list[RecomputationPoint] = []
    for point in sorted(points, key=lambda point: (-point.samples_per_second, point.share)):
        if not found or point.share < found[-1].share:
            found.append(point)
    return found


def _with_changed_sets(run: Run, found: list[RecomputationPoint]) -> list[RecomputationPoint]:
    """Change the best sets by one operation or group, as long as a changed set is better."""
    groups = _changes(run)
    tried = {frozenset(point.checkpoints) for point in found}
    while len(tried) < _CHANGED_SETS:
        sets = [frozenset(p.checkpoints) for p in found if p.run.settings.recompute == "stage"]
        changed = (one - group if group <= one else one | group for group in groups for one in sets)
        fresh = list(dict.fromkeys(one for one in changed if one not in tried))
        fresh = fresh[: _CHANGED_SETS - len(tried)]
        tried.update(fresh)
        better = _best([*found, *(_point(run, _marked(run, chosen)) for chosen in fresh)])
        if better == found:
            break
        found = better
    return found


def _changes(run: Run) -> list[frozenset[str]]:
    """Return the operations, or the groups of operations, by which a set may be changed.

    The operations of a group belong to different layers, and their names are equal except for
    numbers.
    """
    names = [o.name for o in run.graph.operations if o.kind != "view" and not o.is_checkpoint]
    if len(names) <= _SINGLE_OPERATIONS:
        return [frozenset({name}) for name in names]
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), set()).add(name)
    return list(map(frozenset, groups.values()))


def _point(run: Run, other: Run) -> RecomputationPoint:
    pairs = zip(run.graph.operations, other.graph.operations, strict=True)
    added = tuple(new.name for old, new in pairs if new.is_checkpoint and not old.is_checkpoint)
    return RecomputationPoint(other, other.fullest.share, other.throughput, added)


def _candidates(run: Run) -> Iterator[Run]:
    """Yield the run with each kind of recomputation and with different sets of checkpoints."""
    for kind in get_args(Recompute):
        if kind != "default":
            yield replace(run, settings=replace(run.settings, recompute=kind))
    operations = run.graph.operations
    if len(operations) <= _FEW_OPERATIONS:
        names = [operation.name for operation in operations]
        for count in range(1, len(names) + 1):
            yield from (_marked(run, chosen) for chosen in combinations(names, count))
        return
    regular = list(_regular(run.graph))
    yield from (_marked(run, chosen) for chosen in regular)
    outside_last = frozenset(
        o.name
        for o, stage in zip(operations, run.placement.stages, strict=True)
        if stage < run.placement.num_stages - 1
    )
    groups = _worth_keeping(run)
    # A checkpoint in the last stage of a pipeline makes this stage recompute, so the sets are also
    # compared without checkpoints in it.
    beginnings = [frozenset[str](), *regular]
    if run.placement.num_stages > 1:
        yield from (_marked(run, chosen & outside_last) for chosen in regular)
        groups = [group & outside_last for group in groups]
    step = max(1, -(-len(groups) // _SETS))
    for beginning in (beginnings[0], beginnings[len(beginnings) // 2], beginnings[-1]):
        chosen = beginning
        for index, group in enumerate(groups, 1):
            chosen |= group
            if index % step == 0:
                yield _marked(run, chosen)


def _marked(run: Run, names: Iterable[str]) -> Run:
    """Return a run that recomputes, with additional operations as checkpoints."""
    chosen = frozenset(names)
    operations = tuple(
        replace(o, is_checkpoint=True) if o.name in chosen else o for o in run.graph.operations
    )
    last = run.placement.num_stages - 1
    again = run.settings.recomputes_last or any(
        o.is_checkpoint and stage == last
        for o, stage in zip(operations, run.placement.stages, strict=True)
    )
    settings = replace(run.settings, recompute="stage", recomputes_last=again)
    return replace(run, graph=replace(run.graph, operations=operations), settings=settings)


def _regular(graph: Graph) -> Iterator[frozenset[str]]:
    """Yield the names of checkpoints at regular distances, with ever greater distances."""
    places = places_to_cut(graph) or cheap_places(graph)
    before = {operation.name for operation in graph.operations if operation.is_checkpoint}
    every = 1
    while places and every <= len(places):
        marked = with_checkpoints(graph, places[every - 1 :: every])
        yield frozenset(o.name for o in marked.operations if o.is_checkpoint) - before
        every = max(every + 1, every * 3 // 2)


def _worth_keeping(run: Run) -> list[frozenset[str]]:
    """Return groups of operations whose outputs may be kept, with the most useful group first.

    A group consists of the operations of all layers whose names are equal except for numbers. The
    most useful group has the operations that take the longest for each byte of their outputs.
    """
    graph = run.graph
    forward, _ = operation_cycles(graph, run.placement, run.settings, run.ipu, run.model)
    saved = {graph.root_of[name] for operation in graph.operations for name in operation.saved}
    names: dict[str, set[str]] = {}
    cost: dict[str, float] = {}
    size: dict[str, int] = {}
    for operation, taken in zip(graph.operations, forward, strict=True):
        root = graph.root_of[operation.output.name]
        if root in saved:
            group = _pattern(operation.name)
            names.setdefault(group, set()).add(operation.name)
            cost[group] = cost.get(group, 0.0) + taken
            size[group] = size.get(group, 0) + graph.root_bytes[root]
    ordered = sorted(names, key=lambda group: -cost[group] / max(1, size[group]))
    return [frozenset(names[group]) for group in ordered]


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
