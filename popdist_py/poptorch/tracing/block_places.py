"""Values of placement: where a block goes, who decides it, and where everything went.

The recorder fills these values, strategies decide them and the rules of overlapped I/O read them.
This module imports none of those three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["BlockPlace", "PlaceBlock", "Placement", "Strategy", "stages_of"]


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block goes.

    Attributes:
        user_id: the block's id; None for what comes before the first block.
        ipu: index of the IPU within a replica.
        stage: the strategy's stage number (within its phase, if it has phases).
        phase: the phase number; 0 for strategies without phases.
    """

    user_id: Any
    ipu: int
    stage: int
    phase: int = 0


def stages_of(places: Iterable[tuple[int, int]]) -> list[int]:
    """Return the stage of each operation of a forward.

    A stage begins where the phase or the IPU changes: neighbouring blocks on one IPU are one stage.

    Args:
        places: Phase and IPU of each operation, in the order in which the operations run.
    """
    stages: list[int] = []
    before = None
    for place in places:
        stages.append(stages[-1] + (place != before) if stages else 0)
        before = place
    return stages


# Maps the id of a block and the IPU id that its annotation gives, if any, to a place.
PlaceBlock = Callable[[Any, int | None], BlockPlace]


class Strategy(Protocol):
    """An execution strategy, as far as placing blocks goes."""

    @property
    def is_pipelined(self) -> bool:
        """Whether stages run at the same time, each on another micro-batch."""

    def _placer(self) -> PlaceBlock:
        """Return what places the blocks of one forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the blocks, operations and parameters of a forward went.

    Attributes:
        blocks: the blocks in the order they were met, repetitions included.
        num_ipus: IPUs that one replica needs.
        num_stages: Number of pipeline stages; a training model has all but the last one twice.
        ipu_of_parameter: index of the IPU that holds each parameter: that of its first use.
        operations: name of each operation's result and the index of its IPU, in order.
        reads_buffers: whether Python code of the forward reads the value of a buffer.
        idle_settings: settings of operators that do nothing here, as programs write them.
    """

    blocks: tuple[BlockPlace, ...]
    num_ipus: int
    num_stages: int
    ipu_of_parameter: Mapping[str, int]
    operations: tuple[tuple[str, int], ...]
    reads_buffers: bool
    idle_settings: tuple[str, ...]
