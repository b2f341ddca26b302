"""The clock cycles that a stage's operations, transfers and weight update take on an IPU.

The estimated time of an operation is the sum of three times: the arithmetic, the exchange between
tiles, and a fixed time. The arithmetic of matrix products is assumed to reach a fixed share of the
peak rate. The speed of the tiles' memory limits the arithmetic of all operations that are not
matrix products. During the exchange, each tile receives from other tiles the data for its part of
the operation's result. The module ``stage_cycles`` does not measure times and does not depend on a
schedule. The docstring of ``CycleModel`` gives the sources of the constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Operation, Placement, Product, Weight
from popdist_py.ipu.links import ring_bandwidth
from popdist_py.ipu.placed_stage import PlacedStage, stage_of
from popdist_py.ipu.recomputation import kept, segments
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.tensor_liveness import shapes, working_set
from popdist_py.ipu.transfers import (
    all_reduce_bytes,
    copied_bytes,
    copied_gradients,
    fetched_bytes,
    received_bytes,
    receiving_stages,
    streamed_bytes,
)

__all__ = ["CYCLE_MODEL", "CycleModel", "StageCycles", "operation_cycles", "stage_cycles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleModel:
    """The constants of the model of time, which no document of Graphcore gives.

    Some constants are assumed. All other constants are fitted to published measurements of
    ResNet-101 and of Graphcore's text on data loading. The same constants apply to all types of IPU
    and to all runs.

    Attributes:
        product_share: The share of the peak rate that matrix products reach. The number
            ``product_share`` is assumed.
        memory_share: The share of the tile memory's bandwidth that operations other than matrix
            products reach. The number ``memory_share`` is assumed.
        operation_cycles: The fixed clock cycles of each program on the IPU, for its launch, for
            synchronisation and for rearranging data. A program (code on the IPU) computes one pass
            of an operation, or one gradient of a matrix product. In a weight update, a program
            updates one weight or one tensor of optimiser state. ``operation_cycles`` is fitted to
            ResNet-101 over two IPUs (7.11 million cycles for each additional micro-batch, and 62.5
            million cycles for each additional device iteration).
        part_cycles: The fixed clock cycles for each part after the first, if a matrix product is
            computed in several parts, one after the other. ``part_cycles`` is assumed to be half of
            ``operation_cycles``.
        host_bandwidth: The bytes per second from the host to an IPU. ``host_bandwidth`` is fitted
            to the clock cycles that 8-bit input saves in published runs of ResNet-101 (4.63 million
            for 24 MiB).
        host_sync_seconds: The seconds that the IPUs and the host need to synchronise for one
            transfer. The transfer of the bytes is not included. ``host_sync_seconds`` is fitted to
            Graphcore's text on data loading. On one replica in this text, real data takes 211
            microseconds longer than synthetic data for each micro-batch of 1 MiB.
        call_seconds: The seconds that each call of the model needs in addition to its
            micro-batches. ``call_seconds`` is fitted to the published runs of ResNet-101 (33
            million clock cycles).
        sync_cycles: The clock cycles for synchronising all IPUs of a replica at the end of each
            pipeline cycle, and of all replicas before each step of an all-reduce. The number
            ``sync_cycles`` is uncertain.
        ring_share: The share of an IPU's IPU-Links that a ring all-reduce uses between the IPUs of
            one IPU-Machine. ``ring_share`` is two of an IPU's ten IPU-Links. ``ring_share`` is
            fitted to Graphcore's text on data loading. With synthetic data in this text, a weight
            update of four replicas takes 0.85 milliseconds longer than one of a single replica.
    """

    product_share: float = 0.7
    memory_share: float = 0.25
    operation_cycles: int = 3_800
    part_cycles: int = 1_900
    host_bandwidth: float = 7.2e9
    host_sync_seconds: float = 64e-6
    call_seconds: float = 25e-3
    sync_cycles: int = 2_000
    ring_share: float = 0.2


CYCLE_MODEL: Final = CycleModel()


@dataclass(frozen=True, slots=True)
class StageCycles:
    """The clock cycles of one pipeline stage, for one micro-batch or for one weight update.

    Attributes:
        forward: The clock cycles of the stage's operations in the forward pass.
        recompute: The clock cycles of the operations that are recomputed for the backward pass.
        backward: The clock cycles for computing the gradients of activations and weights, and for
            accumulating the gradients of weights.
        receive: The clock cycles for receiving the stage's inputs from the host.
        copy: The clock cycles for sending the stage's activations to other IPUs. The attribute
            ``copy`` does not include the clock cycles for sending gradients back to the stage.
        load: The clock cycles for loading weights and inputs of the stage from Streaming Memory.
            The attribute ``load`` is used only if phases (parts of the model) are loaded and run
            one after the other.
        offload: The clock cycles for moving weights, accumulators and kept activations from and to
            Streaming Memory; 0 in phased execution.
        update: The clock cycles of one update of the stage's weights, including transfers from and
            to Streaming Memory.
        all_reduce: The clock cycles of the all-reduce of the stage's gradients over the replicas.
        copy_gradients: The clock cycles in which other IPUs send gradients back to the stage; 0 for
            inference.
    """

    forward: float
    recompute: float
    backward: float
    receive: float
    copy: float
    load: float
    offload: float
    update: float
    all_reduce: float
    copy_gradients: float = 0.0

    @property
    def work(self) -> float:
        """The clock cycles that the stage computes for one micro-batch, in all passes together."""
        return self.forward + self.recompute + self.backward


def stage_cycles(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    index: int,
    model: CycleModel = CYCLE_MODEL,
) -> StageCycles:
    """Return the estimated clock cycles of one pipeline stage."""
    stage = stage_of(graph, placement, settings, ipu, index)
    device = _Device(stage, ipu, model)
    again: list[Operation] = []
    if index in settings.recomputing(placement):
        keeps = kept(stage, settings.recompute_for(placement))
        again = [o for segment in segments(stage, keeps) for o in segment.again]
    weights = placement.weights_of(graph, index)
    copied = copied_bytes(graph, placement, index)
    returned = copied_gradients(graph, placement, index) if settings.is_training else 0
    link = ipu.link_bandwidth / 2 / ipu.clock
    streaming = (ipu.streaming_bandwidth or ipu.host_bandwidth) / ipu.clock
    arriving = sum(graph.root_bytes[root] for root in stage.incoming)
    return StageCycles(
        forward=sum(map(device.forward, stage.operations)),
        recompute=sum(map(device.forward, again)),
        backward=sum(map(device.backward, stage.operations)) if settings.is_training else 0.0,
        receive=ipu.clock * _receive_seconds(graph, placement, settings, index, model),
        copy=copied / link,
        load=(arriving + sum(weight.bytes for weight in weights)) / streaming,
        offload=_offloaded_bytes(stage, placement, index, weights) / streaming,
        update=device.update(weights) + streamed_bytes(weights, settings) / streaming,
        all_reduce=_all_reduce_cycles(weights, placement, settings, ipu, model),
        copy_gradients=returned / link,
    )


def _receive_seconds(
    graph: Graph, placement: Placement, settings: Settings, index: int, model: CycleModel
) -> float:
    """Return the seconds in which a stage receives its inputs from the host.

    A transfer from the host stops all IPUs of a replica. A stage therefore also waits for the
    synchronisations of the other stages that receive inputs.
    """
    received = 0 if settings.synthetic_data else received_bytes(graph, placement, index)
    if not received:
        return 0.0
    syncs = receiving_stages(graph, placement) * model.host_sync_seconds
    return received / model.host_bandwidth + syncs


def _all_reduce_cycles(
    weights: tuple[Weight, ...],
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel,
) -> float:
    """Return the clock cycles of the all-reduce of the gradients of a stage's weights."""
    size = all_reduce_bytes(weights, settings)
    if not size:
        return 0.0
    rate = ring_bandwidth(ipu, settings.replicas, placement.num_ipus, model.ring_share)
    steps = 2 * (settings.replicas - 1)
    return size * ipu.clock / rate + steps * model.sync_cycles


def _offloaded_bytes(
    stage: PlacedStage, placement: Placement, index: int, weights: tuple[Weight, ...]
) -> int:
    """Return the bytes that a stage moves from and to Streaming Memory for one micro-batch.

    In phased execution, the returned number is 0, because ``StageCycles.load`` contains these
    transfers.
    """
    settings = stage.settings
    if settings.is_phased:
        return 0
    size = fetched_bytes(weights, settings)
    if settings.is_training and not settings.activation_location.on_chip:
        recomputes = index in settings.recomputing(placement)
        keeps = kept(stage, settings.recompute_for(placement) if recomputes else "none")
        size += 2 * sum(stage.graph.root_bytes[root] for root in keeps)
    return size


def operation_cycles(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel = CYCLE_MODEL,
) -> tuple[list[float], list[float]]:
    """Return the clock cycles of each operation's forward pass, and of each backward pass.

    The first returned list contains the clock cycles of the operations' forward passes for one
    micro-batch. The second returned list contains the clock cycles of the operations' backward
    passes, which are all 0 for inference.
    """
    forward: list[float] = []
    backward: list[float] = []
    for index in range(placement.num_stages):
        stage = stage_of(graph, placement, settings, ipu, index)
        device = _Device(stage, ipu, model)
        forward += map(device.forward, stage.operations)
        backward += map(device.backward, stage.operations)
    return forward, backward if settings.is_training else [0.0] * len(backward)


@dataclass(frozen=True, slots=True)
class _Device:
    """Computes the clock cycles of the operations and weight updates of one stage on an IPU."""

    stage: PlacedStage
    ipu: IPU
    model: CycleModel

    def forward(self, operation: Operation) -> float:
        return self._pass(operation, backward=False)

    def backward(self, operation: Operation) -> float:
        """Return the clock cycles of an operation's backward pass, with gradient accumulation."""
        added = 0
        if self.stage.settings.accumulation > 1:
            width = 2 * BYTES[self.stage.settings.gradient_type]
            added = width * sum(w.elements for w in self._trained(operation))
        return self._pass(operation, backward=True) + self._moved(added)

    def update(self, weights: tuple[Weight, ...]) -> float:
        """Return the clock cycles of an update of the given weights.

        A weight update reads weights, gradients and optimiser state, and writes weights and
        optimiser state. In a combined optimiser, the first tensor of the state contains the
        gradients.
        """
        optimizer = self.stage.settings.optimizer
        trained = [weight for weight in weights if weight.is_trained]
        state = sum(BYTES[type_] for type_ in optimizer.state)
        gradient = 0 if optimizer.is_combined else BYTES[optimizer.accumulator]
        size = sum(w.elements * (2 * BYTES[w.type] + 2 * state + gradient) for w in trained)
        # One program updates the weight, and one program updates each tensor of optimiser state.
        programs = len(trained) * (1 + len(optimizer.state))
        return self._moved(size) + self.model.operation_cycles * programs

    def _trained(self, operation: Operation) -> list[Weight]:
        weights = (self.stage.graph.weight_of[name] for name in operation.weights)
        return [weight for weight in weights if weight.is_trained]

    def _moved(self, size: float) -> float:
        """Return the clock cycles for reading or writing ``size`` bytes in the tiles' memory."""
        return size / (self.stage.tiles * self.ipu.memory_rate * self.model.memory_share)

    def _pass(self, operation: Operation, *, backward: bool) -> float:
        if operation.kind == "view":
            return 0.0
        if operation.product is not None:
            return self._products(operation, backward=backward)
        graph = self.stage.graph
        size = sum(graph.bytes_of(n) for n in operation.inputs) + graph.bytes_of(
            operation.output.name
        )
        # Some operations read their input elements several times. For example, a normalisation
        # reads its input a first time to compute mean and variance.
        passes = _PASSES.get(operation.kind, 1) * (2 if backward else 1)
        exchanged = size / (self.stage.tiles * self.ipu.exchange_rate)
        return self._moved(passes * size) + exchanged + self.model.operation_cycles

    def _products(self, operation: Operation, *, backward: bool) -> float:
        stage, total = self.stage, 0.0
        operands, partials = operation.output.type, stage.partials(operation)
        tiles = stage.tiles / self.ipu.tiles
        rate = self.ipu.product_rate(operands, partials) * tiles * self.model.product_share
        limit = stage.limit(operation)
        needed = any(name in stage.graph.needs_gradient for name in operation.inputs[:1])
        for number, shape in enumerate(shapes(operation, stage.graph, backward=backward)):
            if backward and number == 0 and not needed:
                continue  # No earlier operation needs the gradient of the first operand.
            held = working_set(shape, operands, partials, stage.tiles)
            parts = max(operation.product.serial if operation.product else 1, -(-held // limit))
            total += _padded_flops(shape, operands) / rate
            total += shape.repeats * held / (stage.tiles * self.ipu.exchange_rate)
            launched = self.model.operation_cycles + (parts - 1) * self.model.part_cycles
            total += shape.repeats * launched
        return total


# The number of a product's columns that the matrix unit of a tile computes together. The number is
# inferred from the convolution vertices of PopLibs.
_COLUMNS: Final = 8
# For each element type of operands, the part of a product's depth that the matrix unit sums in one
# step. ``_DEPTH`` applies to all other types.
_DEPTHS: Final[Mapping[str, int]] = {"float16": 16}
_DEPTH: Final = 8


@lru_cache(maxsize=4096)
def _padded_flops(product: Product, operands: str) -> int:
    """Return the floating-point operations of a matrix product with padded sides.

    The matrix unit of a tile computes blocks of fixed size. Groups of a convolution share blocks,
    so the sides of a grouped convolution are not padded.
    """
    if product.is_convolution and product.count > 1:
        return product.flops
    grain = _DEPTHS.get(operands, _DEPTH)
    depth = -(-product.depth // grain) * grain
    columns = -(-product.columns // _COLUMNS) * _COLUMNS
    return replace(product, depth=depth, columns=columns).flops


# For some kinds of operation, the number of times that the operation reads or writes its elements.
# Operations of a kind that is not in ``_PASSES`` read or write their elements once.
_PASSES: Final[Mapping[str, int]] = {"norm": 3, "softmax": 3, "loss": 2}
