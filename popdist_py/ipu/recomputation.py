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
    """A part of a stage whose backward pass begins with a recomputation.

    Attributes:
        operations: The operations of this part of the stage, in the order of the forward pass.
        again: The operations that are recomputed just before the backward pass of ``operations``.
            The results in ``again`` may also be read by the backward passes of earlier segments.
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
    read, wanted = set(stage.saved), set[str]()
    again = []
    for operation in reversed(stage.operations):
        name = operation.output.name
        root = root_of[name]
        if root not in stage.saved and name not in wanted:
            continue
        changes_received = operation.is_in_place and root in stage.incoming
        if root not in keeps | stage.incoming or changes_received:
            again.append(operation)
            read |= {root_of[source] for source in operation.inputs}
            wanted.update(operation.inputs)
        else:
            wanted.update(_shared_input(stage, operation))
    return frozenset(read), tuple(reversed(again))


def _shared_input(stage: PlacedStage, operation: Operation) -> tuple[str, ...]:
    """Return the name of the input whose memory an operation's output shares, if there is one."""
    root_of = stage.graph.root_of
    first = operation.inputs[:1]
    return first if first and root_of[first[0]] == root_of[operation.output.name] else ()


def segments(stage: PlacedStage, keeps: frozenset[str]) -> tuple[Segment, ...]:
    """Divide a stage into segments whose backward passes begin with a recomputation.

    PopART recomputes each operation once, just before the first backward pass that needs the
    result of the operation. The backward pass runs the last segment first. A tensor that all layers
    of a stage read (such as an attention mask) is therefore recomputed with the last layer.
    """
    operations, before = stage.operations, _recomputed_before(stage, keeps)
    again_at: dict[int, tuple[Operation, ...]] = {}
    for index, again in enumerate(before):
        if not again:
            continue
        # An addition belongs to the segment of its operands. The gradients of the operands are the
        # gradient of the sum, so they need no memory of their own during the recomputation.
        end = index + 1
        while end < len(operations) and operations[end].kind == "add" and not before[end]:
            end += 1
        again_at[end] = again
    ends = sorted({0, *again_at, len(operations)})
    return tuple(
        Segment(operations[begin:end], again_at.get(end, ())) for begin, end in pairwise(ends)
    )


def _recomputed_before(stage: PlacedStage, keeps: frozenset[str]) -> list[tuple[Operation, ...]]:
    """Return, for each operation, the operations to recompute just before its backward pass.

    Every operation is recomputed at most once. Operations that are recomputed before the backward
    pass of a later operation are not recomputed again.
    """
    operations, root_of = stage.operations, stage.graph.root_of
    names = frozenset(operation.name for operation in _recomputed(stage, keeps)[1])
    makers: dict[str, int] = {}
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for index, operation in enumerate(operations):
        makers[operation.output.name] = index
        if operation.name in names:
            writers.setdefault(root_of[operation.output.name], []).append(index)
            for name in operation.inputs:
                readers.setdefault(root_of[name], []).append(index)
    before: list[tuple[Operation, ...]] = []
    done: set[int] = set()
    for operation in reversed(operations):
        waiting = [i for name in operation.saved for i in writers.get(root_of[name], ())]
        again = []
        while waiting:
            index = waiting.pop()
            if index in done:
                continue
            done.add(index)
            needed = operations[index]
            inputs = _shared_input(stage, needed)
            if needed.name in names:
                again.append(index)
                inputs = needed.inputs
                root = root_of[needed.output.name]
                if needed.is_in_place:
                    # The operations that read the old elements must be recomputed before.
                    old = readers.pop(root, [])
                    waiting += [reader for reader in old if reader < index]
                    readers[root] = [reader for reader in old if reader > index]
            waiting += [makers[name] for name in inputs if name in makers]
        before.append(tuple(operations[index] for index in sorted(again)))
    return before[::-1]
