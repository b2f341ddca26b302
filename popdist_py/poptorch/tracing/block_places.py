"""Data classes for the places of blocks, and the interface of execution strategies.

An execution strategy chooses the place of each block. A ``BlockRecorder`` collects the places of
one forward in a ``ForwardPlaces``. This module does not import strategies or recorders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["BlockPlace", "ForwardPlaces", "PlaceBlock", "Strategy"]


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a block.

    Attributes:
        user_id: The id of the block; None for the operations before the first block.
        ipu: The index of the IPU within a replica.
        stage: The number of the stage in the strategy, or in the phase if the strategy has phases.
        phase: The number of the phase; 0 for strategies without phases.
    """

    user_id: Any
    ipu: int
    stage: int
    phase: int = 0


# A function that returns the place of a block. The arguments are the id of the block, and the IPU
# id that the program gives. If the program does not give an IPU id, the argument is None.
PlaceBlock = Callable[[Any, int | None], BlockPlace]


class Strategy(Protocol):
    """The methods of an execution strategy that concern the places of blocks."""

    @property
    def is_pipelined(self) -> bool:
        """Whether stages run at the same time, each on a different micro-batch."""

    def _placer(self) -> PlaceBlock:
        """Return a function that chooses the places of the blocks of one forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlaces:
    """The places of the blocks, operations and parameters of a forward.

    Attributes:
        blocks: The blocks in the order of execution, including repetitions.
        num_ipus: The number of IPUs that one replica needs.
        num_stages: The number of pipeline stages. In a training model, every stage except the last
            counts twice: once for the forward pass and once for the backward pass.
        ipu_of_parameter: The index of the IPU that first uses each parameter.
        operations: The name of each operation's result, and the index of the operation's IPU.
        reads_buffers: Whether Python code of the forward reads the value of a buffer.
        idle_settings: The names of operators' settings that do not have an effect on emulated IPUs.
    """

    blocks: tuple[BlockPlace, ...]
    num_ipus: int
    num_stages: int
    ipu_of_parameter: Mapping[str, int]
    operations: tuple[tuple[str, int], ...]
    reads_buffers: bool
    idle_settings: tuple[str, ...]
