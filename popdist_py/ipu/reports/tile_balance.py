"""The tile balance of an IPU: the mean work of its tiles, divided by the busiest tile's work.

The inputs, weights and output of an operation are spread over the tiles in grains, which are small
parts of equal size. The first grain of every operation is on the same tile, as in the module
``memory``. The work of a tile is proportional to its number of grains. The module ``tile_balance``
does not compute the duration of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from popdist_py.ipu.graph import Graph, Operation, Placement
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.stage_cycles import CycleModel, operation_cycles

__all__ = ["tile_balance"]


def tile_balance(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel,
    grain: int,
) -> tuple[float, ...]:
    """Return the tile balance of each IPU.

    A tile balance is a number between 0 and 1. The tile balance of an IPU without work is 1.

    Args:
        graph: The graph of the forward pass.
        placement: The stage of each operation, and the IPU of each stage.
        settings: The options of the run, such as the number of I/O tiles.
        ipu: The figures of the type of IPU, such as its number of tiles.
        model: The constants for estimating clock cycles, such as the bandwidth of the tiles'
            memory. The constant ``operation_cycles`` is not used, because all tiles need the same
            time to launch an operation and to synchronise.
        grain: The number of consecutive bytes of a tensor that are stored on the same tile.
    """
    tiles = ipu.tiles - settings.io_tiles
    alone = replace(model, operation_cycles=0)
    passes = operation_cycles(graph, placement, settings, ipu, alone)
    mean, busiest = [0.0] * placement.num_ipus, [0.0] * placement.num_ipus
    for operation, stage, work in zip(
        graph.operations, placement.stages, map(sum, zip(*passes, strict=True)), strict=True
    ):
        grains = max(1, -(-sum(_sizes(graph, operation)) // grain))
        own = placement.ipus[stage]
        mean[own] += work
        busiest[own] += work * -(-grains // tiles) * tiles / grains
    return _shares(mean, busiest)


def _sizes(graph: Graph, operation: Operation) -> Iterator[int]:
    """Yield the bytes of each input, weight and output of an operation."""
    yield from map(graph.bytes_of, (*operation.inputs, operation.output.name))
    yield from (graph.weight_of[name].bytes for name in operation.weights)


def _shares(mean: Sequence[float], busiest: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / most if most else 1.0 for one, most in zip(mean, busiest, strict=True))
