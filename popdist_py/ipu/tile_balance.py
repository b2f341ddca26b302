"""Tile balance of each IPU: the mean work of its tiles, divided by the most work of a tile.

The inputs, weights and output of an operation are spread over the tiles in whole grains, from the
same tile on, as in ``memory``. A tile's work grows with its number of grains. The module does not
know how long a call takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from popdist_py.ipu.cycles import CycleModel, operation_cycles
from popdist_py.ipu.graph import Graph, Operation, Placement
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU

__all__ = ["tile_balance"]


def tile_balance(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel,
    grain: int,
) -> tuple[float, ...]:
    """Return a share between 0 and 1 for each IPU of a replica; 1 for one without work.

    Args:
        graph: the operations of the forward.
        placement: the stage of each operation, and the IPU of each stage.
        settings: the settings of the run.
        ipu: the device.
        model: the model of time. Launching and synchronising are left out, because they take the
            same time on all tiles.
        grain: the number of bytes that stay together on a tile.
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
