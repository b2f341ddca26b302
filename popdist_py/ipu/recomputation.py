"""The tensors that a stage keeps for its backward pass, and the operations that it recomputes.

The module ``recomputation`` does not estimate the memory or the time of the recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from popdist_py.ipu.checkpoint_choice import chosen_checkpoints
from popdist_py.ipu.graph import Operation
from popdist_py.ipu.placed_stage import PlacedStage
from popdist_py.ipu.settings import Recompute

__all__ = ["Segment", "kept", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage whose operations are recomputed together, before their backward pass.

    Attributes:
        operations: The operations of this part of the stage, in the order of the forward pass.
        again: The operations that are recomputed just before the backward pass of ``operations``.
    """

    operations: tuple[Operation, ...]
    again: tuple[Operation, ...]


def kept(stage: PlacedStage, recompute: Recompute) -> frozenset[str]:
    """Return the names of the tensors that a stage keeps in memory for its backward pass.

    A checkpoint or an input of the stage is kept only if the backward pass or a recomputed
    operation reads it.
    """
    if recompute == "none":
        return stage.saved
    root_of = stage.graph.root_of
    marked = {root_of[o.output.name] for o in stage.operations if o.is_checkpoint}
    candidates = frozenset(marked | stage.incoming)
    if recompute == "standard":
        candidates |= chosen_checkpoints(stage)
    if recompute == "norm":
        candidates |= stage.saved - _cheap(stage)
    read, _ = _recomputed(stage, candidates)
    return candidates & read


def _cheap(stage: PlacedStage) -> frozenset[str]:
    """Return the names of the tensors that the recomputation "norm" computes again."""
    root_of = stage.graph.root_of
    kinds: dict[str, set[str]] = {}
    for operation in stage.operations:
        kinds.setdefault(root_of[operation.output.name], set()).add(operation.kind)
    for operation in stage.operations:
        if operation.kind == "elementwise" and operation.inputs:
            source = root_of[operation.inputs[0]]
            kinds[root_of[operation.output.name]] |= kinds.get(source, {"input"}) - {"view"}
    return frozenset(
        root
        for root, of_root in kinds.items()
        if "norm" in of_root and of_root <= {"norm", "elementwise", "view"}
    )


def _recomputed(
    stage: PlacedStage, keeps: frozenset[str]
) -> tuple[frozenset[str], tuple[Operation, ...]]:
    """Return what the backward pass reads, and the operations that are recomputed for it.

    The first returned value contains the names of the tensors that the backward pass or a
    recomputed operation reads. The tensors in ``keeps`` are kept from the forward pass. A stage
    keeps the original values of the tensors that it receives, so operations that change a received
    tensor in place are also recomputed.
    """
    if stage.saved <= keeps:
        return stage.saved, ()
    root_of = stage.graph.root_of
    read = set(stage.saved)
    again = []
    for operation in reversed(stage.operations):
        root = root_of[operation.output.name]
        changes_received = operation.is_in_place and root in stage.incoming
        if root in read and (root not in keeps | stage.incoming or changes_received):
            again.append(operation)
            read |= {root_of[name] for name in operation.inputs}
    return frozenset(read), tuple(reversed(again))


def segments(stage: PlacedStage, keeps: frozenset[str]) -> tuple[Segment, ...]:
    """Divide a stage into segments whose operations are recomputed together.

    A segment ends where the recomputation and the backward pass of later operations need only
    tensors that the stage keeps in memory. Each segment can therefore be recomputed independently
    of the other segments.
    """
    root_of = stage.graph.root_of
    again = frozenset(operation.name for operation in _recomputed(stage, keeps)[1])
    last_read: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        inputs = operation.inputs if operation.name in again else ()
        for name in (*inputs, *operation.saved):
            last_read[root_of[name]] = index
    made: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        made.setdefault(root_of[operation.output.name], index)
    # For each operation, the change in the number of open blocks of memory. An open block of memory
    # is not kept, and the recomputation or backward pass of a later operation reads it.
    crossing = [0] * (len(stage.operations) + 1)
    for root, first in made.items():
        if root not in keeps and last_read.get(root, first) > first:
            crossing[first] += 1
            crossing[last_read[root]] -= 1
    # An addition belongs to the segment of its operands. The gradients of the operands are the
    # gradient of the sum, so they need no memory of their own before the operands are recomputed.
    added = [operation.kind == "add" for operation in stage.operations[1:]]
    cuts, open_blocks = [0], 0
    for index, is_added_next in enumerate([*added, False]):
        open_blocks += crossing[index]
        if not open_blocks and not is_added_next:
            cuts.append(index + 1)
    return tuple(
        Segment(part, tuple(operation for operation in part if operation.name in again))
        for begin, end in pairwise(cuts)
        if (part := stage.operations[begin:end])
    )
