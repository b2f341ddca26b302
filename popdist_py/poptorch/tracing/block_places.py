"""Data classes for the IPUs and stages of blocks, and the interface of execution strategies.

An execution strategy chooses the IPU and the stage of each block of operations. A ``BlockRecorder``
collects the chosen IPUs and stages of one forward pass in a ``ForwardPlaces``. The module
``block_places`` does not import execution strategies or recorders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["BlockPlace", "ForwardPlaces", "PlaceBlock", "Strategy"]


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The IPU, the stage (part of a pipeline) and the phase of a block of operations.

    Attributes:
        user_id: The id of the block; None for operations before the model's first block.
        ipu: The index of the IPU within a replica.
        stage: The number of the stage within the execution strategy. If the strategy has phases,
            ``stage`` is the number of the stage within the phase.
        phase: The number of the phase; 0 for strategies without phases. A phase is a part of the
            model that is loaded onto the IPUs, run, and removed again before the next phase.
    """

    user_id: Any
    ipu: int
    stage: int
    phase: int = 0


# A function that returns the IPU, stage and phase of a block. The function's first argument is the
# id of the block. The second argument is the IPU id that the program gave for the block, or None.
PlaceBlock = Callable[[Any, int | None], BlockPlace]


class Strategy(Protocol):
    """The interface of execution strategies for code that traces a forward pass."""

    @property
    def is_pipelined(self) -> bool:
        """Whether the stages of a model run at the same time, each on a different micro-batch."""

    def _placer(self) -> PlaceBlock:
        """Return a function that chooses the IPU and stage of each block of one forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlaces:
    """The IPUs and stages of the blocks, operations and parameters of a model.

    Attributes:
        blocks: The blocks (groups of operations) in the order of execution. A block of operations
            that runs twice occurs twice.
        num_ipus: The number of IPUs that one replica needs.
        num_stages: The number of pipeline stages of the model. In a training model, every stage
            except the last stage counts twice: once for the forward pass and once for the backward
            pass.
        ipu_of_parameter: The index of the IPU that first uses each parameter.
        operations: The name of each operation's result, and the index of the operation's IPU.
        reads_buffers: Whether Python code of the forward method reads the elements of a buffer.
        idle_settings: The names of the operator settings in the model that do not have an effect on
            emulated IPUs.
    """

    blocks: tuple[BlockPlace, ...]
    num_ipus: int
    num_stages: int
    ipu_of_parameter: Mapping[str, int]
    operations: tuple[tuple[str, int], ...]
    reads_buffers: bool
    idle_settings: tuple[str, ...]
