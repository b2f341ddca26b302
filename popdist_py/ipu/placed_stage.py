"""One stage of a model on its IPU, and the tensors that it exchanges with other stages.

The module ``placed_stage`` does not estimate memory or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from popdist_py.ipu.graph import Graph, Operation, Placement, Type
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU

__all__ = ["PlacedStage", "stage_of"]

# The library PopLibs estimates the temporary memory of a matrix product by adding its operands
# before and after rearranging, its partial sums, and their sums. ``_PLANNED`` is this estimate,
# divided by the bytes that the tiles use at one time. No document of Graphcore gives the number. If
# ``_PLANNED`` were above 6, the default memory proportion would divide one matrix product of
# ResNet-101 over two IPUs into parts. The estimates would then contradict the published memory and
# cycles of this run.
_PLANNED: Final = 6


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a model, with the options and figures of the IPU that runs the stage.

    Attributes:
        graph: The graph of the model's whole forward pass.
        operations: The operations of the stage, in execution order.
        settings: The options of the run, such as the number of replicas.
        ipu: The number of the IPU that runs the stage. The available memory proportion can differ
            between IPUs.
        tiles: The number of tiles of the IPU that compute. I/O tiles, which only transfer data, are
            not counted.
        memory: The memory in bytes of the tiles that compute. The available memory proportion (a
            PopTorch option) is a share of ``memory``.
        stored: The names of the weights that the IPU of the stage stores. A weight that several
            IPUs read is stored on the IPU that reads it first.
    """

    graph: Graph
    operations: tuple[Operation, ...]
    settings: Settings
    ipu: int
    tiles: int
    memory: int
    stored: frozenset[str] = frozenset()

    def limit(self, operation: Operation) -> float:
        """Return the most bytes that an operation's matrix product may use at the same time.

        The available memory proportion of the operation limits this number of bytes. An operation
        without its own available memory proportion uses the proportion of its IPU.
        """
        proportion = operation.memory_proportion
        if proportion is None:
            is_convolution = _is_convolution(operation)
            proportion = self.settings.proportion(self.ipu, is_convolution=is_convolution)
        return proportion * self.memory / _PLANNED

    def partials(self, operation: Operation) -> Type:
        """Return the element type of the partial sums inside an operation's matrix product."""
        return self.settings.partials_of(is_convolution=_is_convolution(operation))

    @cached_property
    def fetches(self) -> bool:
        """Whether operations fetch weights or accumulators that the IPU does not store completely.

        In phased execution, ``fetches`` is False, because each phase (a part of the model) fetches
        all its data before it runs.
        """
        weights, settings = self.settings.weight_location, self.settings
        is_whole = weights.on_chip and not weights.is_sharded and not self._shares_weights
        return not (settings.is_phased or (is_whole and settings.accumulator_location.on_chip))

    @cached_property
    def _shares_weights(self) -> bool:
        return any(name not in self.stored for o in self.operations for name in o.weights)

    @cached_property
    def saved(self) -> frozenset[str]:
        """The names of the tensors whose memory the backward pass of the stage reads."""
        return frozenset(self.graph.root_of[name] for o in self.operations for name in o.saved)

    @cached_property
    def incoming(self) -> frozenset[str]:
        """The names of the tensors that the stage receives from other stages or from the host."""
        made = {operation.output.name for operation in self.operations}
        names = {name for o in self.operations for name in o.inputs} - made
        return frozenset(self.graph.root_of[name] for name in names)

    @cached_property
    def outgoing(self) -> frozenset[str]:
        """The names of the stage's tensors that other stages or the host read."""
        graph = self.graph
        own = {operation.name for operation in self.operations}
        found = {operation.output.name for operation in self.operations} & set(graph.outputs)
        for operation in self.operations:
            readers = graph.readers.get(operation.output.name)
            # The operations of a stage follow one another, so that the last operation that reads a
            # tensor of the stage belongs to another stage if any such operation does.
            if readers and graph.operations[readers[-1]].name not in own:
                found.add(operation.output.name)
        return frozenset(graph.root_of[name] for name in found)


def _is_convolution(operation: Operation) -> bool:
    return operation.product is not None and operation.product.is_convolution


def stage_of(
    graph: Graph, placement: Placement, settings: Settings, ipu: IPU, stage: int
) -> PlacedStage:
    """Return one stage of a model, with all values that determine its memory and time."""
    where = placement.ipus[stage]
    own = [s for s, number in enumerate(placement.ipus) if number == where]
    return PlacedStage(
        graph=graph,
        operations=tuple(placement.operations_of(graph, stage)),
        settings=settings,
        ipu=placement.ipus[stage],
        tiles=ipu.tiles - settings.io_tiles,
        memory=(ipu.tiles - settings.io_tiles) * ipu.tile_bytes,
        stored=frozenset(w.name for s in own for w in placement.weights_of(graph, s)),
    )
