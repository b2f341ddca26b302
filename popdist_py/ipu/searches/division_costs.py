"""The time and the memory of a model's divisions into stages, with cached results for each stage.

A search for the best division compares many divisions that have most stages in common. The class
``DivisionCosts`` therefore estimates each stage once, although many divisions contain the stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Final, TypeAlias

from popdist_py.ipu.accumulation_window import window_length
from popdist_py.ipu.cycles import call_total, sending_seconds
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import ipu_memory, least_bytes, stash_depth
from popdist_py.ipu.searches.places import lives
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.stage_cycles import StageCycles, operation_cycles, stage_cycles

__all__ = ["Cuts", "DivisionCosts", "Effort", "EffortSpent", "placement_of", "shared_weights"]

# The places where the stages of a model begin and end, in ascending order. A place is the number of
# the operation behind the place. The first place is 0, and the last one the number of operations.
Cuts: TypeAlias = tuple[int, ...]

# The largest number of parts of a model whose weight updates are estimated separately.
_PARTS: Final = 64


class EffortSpent(Exception):
    """The search has estimated the memory of as many operations as it may."""


@dataclass(slots=True)
class Effort:
    """The number of operations whose memory a search may still estimate.

    The limit bounds the time of a search, and makes its result independent of the machine's speed.

    Attributes:
        left: The number of operations that the search may still estimate.
        is_spent: Whether the search had to leave out a part of its comparisons.
    """

    left: float = inf
    is_spent: bool = False

    def is_enough(self, operations: int) -> bool:
        """Return whether a search among so many operations is worth its preparation."""
        if self.left < 2 * operations:
            self.is_spent = True
        return not self.is_spent

    def spend(self, operations: int) -> None:
        """Count operations whose memory is estimated next.

        Raises:
            EffortSpent: The search may not estimate so many operations any more.
        """
        if operations > self.left:
            self.is_spent = True
            raise EffortSpent
        self.left -= operations


class DivisionCosts:
    """The time and the memory of all divisions of a model that use the same list of IPUs.

    Attributes:
        run: The configuration of the run. ``DivisionCosts`` does not use its placement.
        ipus: The number of the IPU of each stage. One IPU may have two stages.
        count: The number of operations of the model.
    """

    def __init__(self, run: Run, ipus: Sequence[int], effort: Effort | None = None) -> None:
        self.run = run
        self.count = len(run.graph.operations)
        self._effort = effort or Effort()
        self._least = [0, *accumulate(least_bytes(run.graph, run.settings))]
        self._room = (run.ipu.tiles - run.settings.io_tiles) * run.ipu.tile_bytes
        self.shared = shared_weights(run.graph)
        self._work = _work_before(run)
        self._update = _update_before(run)
        self._lives = lives(run.graph)
        # For each place where a stage ends, the cycles for copying the tensors of all operations
        # before each place.
        self._copies: dict[int, list[float]] = {}
        made = {o.output.name: i for i, o in enumerate(run.graph.operations)}
        self._receivers = sorted(_first_readers(run.graph).values())
        self._outputs = [made[name] for name in run.graph.outputs if name in made]
        self._set_ipus(ipus)

    def _set_ipus(self, ipus: Sequence[int]) -> None:
        """Compute the attributes that depend on the IPUs of the stages."""
        self.ipus, run = tuple(ipus), self.run
        again = run.settings.recomputing(Placement(tuple(range(len(self.ipus))), self.ipus))
        # Stages with equal kinds have equal times, and stashes of different depths at most.
        self._kinds = [
            (stage in again, run.settings.proportion(ipu), run.settings.matmul_proportion and ipu)
            for stage, ipu in enumerate(self.ipus)
        ]
        stages = range(len(self.ipus))
        self._depths = [stash_depth(s, len(self.ipus), run.settings) for s in stages]
        self._stages: dict[tuple[object, ...], StageCycles] = {}
        self._shares: dict[tuple[object, ...], dict[tuple[int, ...], float]] = {}
        self._sending: dict[tuple[int, ...], float] = {}
        self._syncs = _sync_cycles(run, len(self.ipus))

    def with_ipus(self, ipus: Sequence[int]) -> DivisionCosts:
        """Return the costs of the same model's divisions that use another list of IPUs."""
        other = copy(self)
        other._set_ipus(ipus)
        return other

    def cycles(self, cuts: Cuts) -> float:
        """Return the clock cycles of one call of the model with a division."""
        run, placement = self.run, placement_of(cuts, self.ipus)
        stages = [self._stage(cuts, placement, stage) for stage in range(len(self.ipus))]
        key = tuple(placement.stages[index] for index in self._outputs)
        if key not in self._sending:
            self._sending[key] = sending_seconds(run.graph, placement, run.settings, run.model)
        windows = run.settings.device_iterations if run.settings.is_training else 1
        running = windows * window_length(stages, placement, run.settings, run.model)
        return call_total(running, self._sending[key], run.settings, run.ipu, run.model)[1]

    def _stage(self, cuts: Cuts, placement: Placement, stage: int) -> StageCycles:
        # Which of a stage's tensors are copied also depends on the other stages on its IPU. The
        # time of a transfer from the host may depend on the number of stages that receive inputs.
        receiving = len({placement.stages[index] for index in self._receivers})
        key = cuts[stage], cuts[stage + 1], self._others(cuts, stage), receiving, self._kinds[stage]
        if key not in self._stages:
            run = self.run
            self._stages[key] = stage_cycles(
                run.graph, placement, run.settings, run.ipu, stage, run.model
            )
        return self._stages[key]

    def _others(self, cuts: Cuts, stage: int) -> tuple[int, ...]:
        same = [s for s, ipu in enumerate(self.ipus) if ipu == self.ipus[stage] and s != stage]
        return tuple(place for s in same for place in cuts[s : s + 2])

    def recomputes(self, stage: int) -> bool:
        """Return whether a stage recomputes activations for its backward pass."""
        return self._kinds[stage][0]

    def estimated_work(self, begin: int, end: int, stage: int) -> float:
        """Return an estimate of the clock cycles that a micro-batch takes in a stage.

        The estimate assumes that a stage that recomputes repeats its whole forward pass. The
        returned clock cycles include the transfers from the host and the copies of the tensors that
        leave the stage.
        """
        forward, backward, receive = (sums[end] - sums[begin] for sums in self._work)
        first = bisect_left(self._receivers, begin)
        if first < len(self._receivers) and self._receivers[first] < end:
            receive += self._syncs
        times = 2 if self.recomputes(stage) else 1
        copies = self._leaving(begin, end) if self.run.settings.is_pipelined else 0.0
        return receive + times * forward + backward + copies

    def estimated_update(self, begin: int, end: int) -> float:
        """Return an estimate of the clock cycles of a stage's weight update, for one micro-batch.

        A weight update counts once for each micro-batch of the pipeline, so its clock cycles are
        divided by their number.
        """
        settings = self.run.settings
        window = settings.accumulation if settings.is_training else settings.device_iterations
        return (self._update[end] - self._update[begin]) / (window + len(self.ipus) - 1)

    def estimated_cycles(self, cuts: Cuts) -> float:
        """Return an estimate of the time of a micro-batch in the pipeline, to compare divisions."""
        work = [0.0] * (max(self.ipus) + 1)
        update = [0.0] * len(work)
        for stage, ipu in enumerate(self.ipus):
            work[ipu] += self.estimated_work(cuts[stage], cuts[stage + 1], stage)
            update[ipu] += self.estimated_update(cuts[stage], cuts[stage + 1])
        if not self.run.settings.is_pipelined:
            return sum(work) + max(update)
        return max(work) + max(update)

    def inequality(self, cuts: Cuts) -> float:
        """Return a number that is the smaller, the more equal the work of the stages is."""
        stages = range(len(self.ipus))
        return sum(self.estimated_work(cuts[s], cuts[s + 1], s) ** 2 for s in stages)

    def _leaving(self, begin: int, end: int) -> float:
        """Return the clock cycles for copying a stage's results, and their gradients back."""
        if end not in self._copies:
            run, graph = self.run, self.run.graph
            sizes = [0.0] * self.count
            for root, (first, last) in self._lives.items():
                if first < end <= last:
                    ways = 2 if run.settings.is_training and root in graph.gradient_roots else 1
                    sizes[first] = ways * graph.root_bytes[root]
            rate = run.ipu.link_bandwidth / 2 / run.ipu.clock
            self._copies[end] = [0.0, *accumulate(size / rate for size in sizes)]
        return self._copies[end][end] - self._copies[end][begin]

    def is_allowed(self, cuts: Cuts) -> bool:
        """Return whether each weight is on one IPU, and no IPU has two stages without reason."""
        stages = range(len(self.ipus))
        if any(self.separates(cuts, stage) for stage in stages):
            return False
        last = len(self.ipus) - 1
        same = self.ipus.index(self.ipus[last])
        return same == last or any(
            self._reads(cuts, same, readers) and self._reads(cuts, last, readers)
            for readers in self.shared
        )

    def _reads(self, cuts: Cuts, stage: int, readers: Sequence[int]) -> bool:
        return any(cuts[stage] <= each < cuts[stage + 1] for each in readers)

    def separates(self, cuts: Cuts, stage: int) -> bool:
        """Return whether another IPU would also read a weight that ``stage`` reads.

        PopART rejects a program in which two IPUs read the same weight.
        """
        others = [s for s, ipu in enumerate(self.ipus) if ipu != self.ipus[stage]]
        return any(
            self._reads(cuts, stage, readers)
            and any(self._reads(cuts, other, readers) for other in others)
            for readers in self.shared
        )

    def fits(self, cuts: Cuts, limit: float) -> bool:
        """Return whether the fullest tile of every IPU has at most a share of ``limit`` in use.

        If the search may not estimate more operations, the function returns False.
        """
        firsts = {ipu: stage for stage, ipu in reversed(list(enumerate(self.ipus)))}
        try:
            return all(self.stage_fits(cuts, stage, limit) for stage in firsts.values())
        except EffortSpent:
            return False

    def stage_fits(self, cuts: Cuts, stage: int, limit: float) -> bool:
        """Return whether the IPU of a stage has room for all of its stages.

        A stage that fits into memory also fits with a smaller stash of activations, so a known
        result for another number of kept micro-batches may be enough.

        Raises:
            EffortSpent: The search may not estimate more operations.
        """
        ipu = self.ipus[stage]
        own = [s for s, where in enumerate(self.ipus) if where == ipu]
        if sum(self._least[cuts[s + 1]] - self._least[cuts[s]] for s in own) > limit * self._room:
            return False
        depths = tuple(self._depths[s] for s in own)
        key = tuple((cuts[s], cuts[s + 1], self._kinds[s], self._depths[s] > 0) for s in own)
        known = self._shares.setdefault(key, {})
        for others, share in known.items():
            if share <= limit and all(a <= b for a, b in zip(depths, others, strict=True)):
                return True
            if share > limit and all(a >= b for a, b in zip(depths, others, strict=True)):
                return False
        self._effort.spend(sum(cuts[s + 1] - cuts[s] for s in own))
        run, placement = self.run, placement_of(cuts, self.ipus)
        memory = ipu_memory(run.graph, placement, run.settings, run.ipu, ipu, run.estimates)
        known[depths] = memory.share
        return known[depths] <= limit

    def cuts_around(self, begin: int, end: int, stage: int, rest: Cuts) -> Cuts | None:
        """Return a division with a given stage, whose other stages are as small as possible.

        The memory of a stage does not depend on the places where the other stages begin and end.

        Args:
            begin: The place where the stage begins.
            end: The place where the stage ends.
            stage: The number of the stage.
            rest: The places where the last stages begin and end, if they are known. The last of the
                places is the number of operations.
        """
        after = len(self.ipus) - stage - len(rest)
        first = rest[0]
        if begin < stage or end > first - after:
            return None
        before = [*range(stage), begin] if stage else [0]
        return (*before, end, *range(first - after + 1, first), *(rest if after else rest[1:]))


def placement_of(cuts: Cuts, ipus: Sequence[int]) -> Placement:
    """Return the ``Placement`` of a division's stages on IPUs."""
    stages = [s for s in range(len(cuts) - 1) for _ in range(cuts[s + 1] - cuts[s])]
    return Placement(tuple(stages), tuple(ipus))


def shared_weights(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, for weights that several operations read, the numbers of the operations."""
    readers: dict[str, list[int]] = {}
    for index, operation in enumerate(graph.operations):
        for name in operation.weights:
            readers.setdefault(name, []).append(index)
    return tuple(sorted({tuple(each) for each in readers.values() if len(each) > 1}))


def _first_readers(graph: Graph) -> dict[str, int]:
    """Return a mapping from each input that is read to the first operation that reads it."""
    readers = ((tensor.name, graph.readers.get(tensor.name)) for tensor in graph.inputs)
    return {name: found[0] for name, found in readers if found}


def _sync_cycles(run: Run, stages: int) -> float:
    """Return an estimate of the cycles that a receiving stage synchronises with the host.

    Each stage that receives inputs waits for the synchronisations of all receiving stages. The
    number of receiving stages is estimated from a division into stages with equally many
    operations.
    """
    if run.settings.synthetic_data or run.settings.overlaps_io:
        return 0.0
    count = len(run.graph.operations)
    receivers = _first_readers(run.graph).values()
    receiving = len({index * stages // count for index in receivers})
    return receiving * run.model.host_sync_seconds * run.ipu.clock


def _work_before(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Return the clock cycles of all operations before each place.

    The returned lists contain the cycles of the forward pass, of the backward pass, and of the
    transfers from the host.
    """
    graph = run.graph
    whole = Placement((0,) * len(graph.operations), (0,))
    forward, backward = operation_cycles(graph, whole, run.settings, run.ipu, run.model)
    receive = [0.0] * len(graph.operations)
    if not (run.settings.synthetic_data or run.settings.overlaps_io):
        for name, first in _first_readers(graph).items():
            receive[first] += graph.bytes_of(name) * run.ipu.clock / run.model.host_bandwidth
    return [0.0, *accumulate(forward)], [0.0, *accumulate(backward)], [0.0, *accumulate(receive)]


def _update_before(run: Run) -> list[float]:
    """Return the clock cycles for updating the weights of all operations before each place.

    The function estimates parts of the model with several operations. The operations of one part
    are assumed to need equal times.
    """
    graph, count = run.graph, len(run.graph.operations)
    if not run.settings.is_training:
        return [0.0] * (count + 1)
    parts = min(count, _PARTS)
    part_of = tuple(index * parts // count for index in range(count))
    placement = Placement(part_of, (0,) * parts)
    settings = replace(run.settings, strategy="sharded", recompute="none")
    update = []
    for part in range(parts):
        found = stage_cycles(graph, placement, settings, run.ipu, part, run.model)
        update.append((found.update + found.all_reduce) / part_of.count(part))
    return [0.0, *accumulate(update[part] for part in part_of)]
