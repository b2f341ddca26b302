"""Values of placement: where a block goes, who decides it, and where everything went.

The recorder fills these values, strategies decide them and the rules of overlapped I/O read them.
This module imports none of those three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["BlockPlace", "PlaceBlock", "Placement", "Strategy"]


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


# Maps the id of a block and the IPU id that its annotation gives, if any, to a place.
PlaceBlock = Callable[[Any, int | None], BlockPlace]


class Strategy(Protocol):
    """An execution strategy, as far as placing blocks goes."""

    @property
    def is_pipelined(self) -> bool:
        """Whether stages run at the same time, each on another micro-batch."""

    def _placer(self) -> PlaceBlock:
        """Return what places the blocks of one forward."""


@dataclass
class Placement:
    """What tracing a forward found out; ``record_placement()`` fills it when it ends.

    Attributes:
        blocks: the blocks in the order they were met, repetitions included.
        num_ipus: IPUs that one replica needs.
        num_stages: pipeline stages: neighbouring blocks on one IPU count as one; a training model
            has all but the last one twice.
        ipu_of_parameter: index of the IPU that holds each parameter: that of its first use.
        operations: name of each operation's result and the index of its IPU, in order.
        reads_buffers: whether Python code of the forward reads the value of a buffer.
        idle_settings: settings of operators that do nothing here, as programs write them.
    """

    blocks: tuple[BlockPlace, ...] = ()
    num_ipus: int = 1
    num_stages: int = 1
    ipu_of_parameter: dict[str, int] = field(default_factory=dict)
    operations: tuple[tuple[str, int], ...] = ()
    reads_buffers: bool = False
    idle_settings: tuple[str, ...] = ()
