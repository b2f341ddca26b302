"""PopART's choice of recomputation checkpoints, which the user does not mark.

With the recomputation "Standard", PopART divides the operations of the forward pass into intervals.
In each interval, PopART looks for the moment between two operations when the fewest bytes are live,
and keeps all tensors that are live at this moment. All other tensors are recomputed. The module
``checkpoint_choice`` does not decide which of the chosen tensors the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from popdist_py.ipu.placed_stage import PlacedStage

__all__ = ["chosen_checkpoints", "decreasing_intervals"]


def chosen_checkpoints(stage: PlacedStage) -> frozenset[str]:
    """Return the names of the tensors of a stage that PopART chooses as checkpoints.

    A tensor is live after an operation if the operation or an earlier operation of the stage
    computes the tensor, and a later operation of the stage reads it. The result of the operation is
    always live. The tensors that the stage receives are not chosen, because they are kept anyway.
    """
    live = _live_after_each(stage)
    sizes = stage.graph.root_bytes
    found: set[str] = set()
    for begin, end in decreasing_intervals(len(live)):
        found |= min(live[begin:end], key=lambda roots: sum(sizes[root] for root in roots))
    return frozenset(found)


def decreasing_intervals(count: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of the intervals into which ``count`` operations are divided.

    Each interval has one operation fewer than the interval before, and the last intervals may be
    missing. At the backward pass of a later interval, more checkpoints are in memory, so fewer
    operations should be recomputed. The source code of PopART names the intervals "decreasing", and
    the difference of one operation is assumed.
    """
    length = 0
    while length * (length + 1) // 2 < count:
        length += 1
    begin = 0
    while begin < count:
        yield begin, min(begin + length, count)
        begin += length
        length -= 1


def _live_after_each(stage: PlacedStage) -> list[frozenset[str]]:
    """Return the live tensors after each operation of a stage that is not a view."""
    root_of = stage.graph.root_of
    last: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        last |= {root_of[name]: index for name in operation.inputs}
    live: set[str] = set()
    found = []
    for index, operation in enumerate(stage.operations):
        own = {root_of[operation.output.name]} - stage.incoming
        live = {root for root in live | own if last.get(root, -1) > index}
        if operation.kind != "view":
            found.append(frozenset(live | own))
    return found
