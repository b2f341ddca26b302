"""Cycles of a run: what each operation takes, stage by stage, along the schedule.

An operation takes arithmetic (products at a share of their peak rate, anything else as fast as the
tiles' memory), exchange of what its tiles have to get, and a fixed time. A cycle of a pipeline
lasts as long as its slowest IPU; then come copies between IPUs, and a synchronisation.
Nothing here measures: the constants of ``CycleModel`` say where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Operation, Placement, Weight
from popdist_py.ipu.liveness import Stage, kept, segments, shapes, stage_of, working_set
from popdist_py.ipu.schedule import Cell, Schedule, schedule
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.transfers import (
    all_reduce_bytes,
    copied_bytes,
    fetched_bytes,
    host_traffic,
    received_bytes,
    streamed_bytes,
)

__all__ = [
    "CYCLE_MODEL",
    "CycleModel",
    "CycleReport",
    "StageCycles",
    "cell_parts",
    "cycle_lengths",
    "cycles",
    "operation_cycles",
    "stage_cycles",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleModel:
    """What no source tells. One set of constants holds for all devices and runs.

    Attributes:
        product_share: share of their peak rate that products reach; assumed.
        memory_share: share of the rate of the tiles' memory that anything else reaches; assumed.
        operation_cycles: for each program of an operation: launch, synchronisation, rearranging;
            fitted to the steady state of ResNet-101 over two IPUs (7.11 million cycles for each
            more micro-batch).
        part_cycles: for each part after the first of a product that is computed in several parts,
            one after the other; assumed to be half of ``operation_cycles``.
        host_bandwidth: bytes a second from the host; fitted to the cycles that 8-bit input saves
            there (4.63 million for 24 MiB).
        call_seconds: for each call of the host; fitted to what those runs take beside their
            micro-batches (33 million cycles).
        sync_cycles: of all IPUs of a replica, at the end of each cycle of a pipeline; uncertain.
    """

    product_share: float = 0.7
    memory_share: float = 0.25
    operation_cycles: int = 4_050
    part_cycles: int = 2_025
    host_bandwidth: float = 7.2e9
    call_seconds: float = 25e-3
    sync_cycles: int = 2_000


CYCLE_MODEL: Final = CycleModel()


@dataclass(frozen=True, slots=True)
class StageCycles:
    """Cycles of one stage for one micro-batch.

    Attributes:
        forward: of its operations.
        recompute: of those that run again.
        backward: of gradients of activations and weights, and their accumulation.
        receive: of its inputs from the host.
        copy: of what it sends to other IPUs, one way.
        load: of what it needs from Streaming Memory in phased execution.
        offload: of weights, accumulators and kept activations that lie in Streaming Memory
            otherwise, both ways.
        update: of the update of its weights, and what that moves.
        all_reduce: of its gradients over the replicas.
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

    @property
    def work(self) -> float:
        """Of a micro-batch: what a pipeline's slowest stage decides about."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class CycleReport:
    """Cycles of one call.

    Attributes:
        stages: for one micro-batch each.
        window: from one update to the next, that included; of inference all of it.
        call: what each call takes beside that: the host, and its results.
        total: of the call.
        busy: for each IPU the share of the total in which it computes.
        clock: cycles a second.
        samples: of the call, over all replicas.
    """

    stages: tuple[StageCycles, ...]
    window: int
    call: int
    total: int
    busy: tuple[float, ...]
    clock: float
    samples: int

    @property
    def seconds(self) -> float:
        """Time of the call."""
        return self.total / self.clock

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


def cycles(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel = CYCLE_MODEL,
) -> CycleReport:
    """Return what one call takes."""
    stages = tuple(
        stage_cycles(graph, placement, settings, ipu, stage, model)
        for stage in range(placement.num_stages)
    )
    window, busy = _window(stages, placement, settings, model)
    windows = settings.device_iterations if settings.is_training else 1
    sent = max(traffic.sent for traffic in host_traffic(graph, placement, settings))
    call, sending = ipu.clock * model.call_seconds, ipu.clock * sent / model.host_bandwidth
    running = windows * window
    if settings.overlaps_io:
        running, sending = max(running, sending), 0.0
    call = 0.0 if settings.synthetic_data else call + sending
    total = running + call
    return CycleReport(
        stages=stages,
        window=round(window),
        call=round(call),
        total=round(total),
        busy=tuple(windows * one / total for one in busy),
        clock=ipu.clock,
        samples=graph.batch * settings.micro_batches * settings.replicas,
    )


def _window(
    stages: tuple[StageCycles, ...], placement: Placement, settings: Settings, model: CycleModel
) -> tuple[float, list[float]]:
    """Return the cycles between two updates, and those in which each IPU computes."""
    one = settings.one_window
    made = schedule(placement, one)
    lasting = cycle_lengths(made, stages, placement, settings)
    busy = [0.0] * placement.num_ipus
    for ipu, row in enumerate(made.rows):
        for cell in row:
            if cell.action in ("forward", "recompute", "backward", "update"):
                busy[ipu] += sum(_times_of(cell, ipu, stages, placement, settings))
    total = sum(lasting) + _copies(stages, one, len(lasting))
    return total + len(lasting) * model.sync_cycles * (placement.num_ipus > 1), busy


def cycle_lengths(
    made: Schedule,
    stages: Sequence[StageCycles],
    placement: Placement,
    settings: Settings,
) -> list[float]:
    """Return the length of each cycle of a schedule: the time that its slowest IPU works.

    I/O tiles load the inputs while the other tiles compute, so the slower of the two counts. Copies
    between IPUs and synchronisations are not included.
    """
    shape = max(made.cycles, default=0), placement.num_ipus
    working, arriving = ([[0.0] * shape[1] for _ in range(shape[0])] for _ in range(2))
    for ipu, row in enumerate(made.rows):
        for cell in row:
            index = made.cycles[cell.step - 1] - 1
            working[index][ipu] += sum(_times_of(cell, ipu, stages, placement, settings))
            if settings.overlaps_io and cell.action == "forward" and cell.stage is not None:
                arriving[index][ipu] += stages[cell.stage].receive
    return [max(*one, *other) for one, other in zip(working, arriving, strict=True)]


def _copies(stages: tuple[StageCycles, ...], settings: Settings, cycles_of_pipeline: int) -> float:
    """Return the cycles of copies between IPUs: in a pipeline all pairs copy at a time."""
    if settings.is_phased:
        return 0.0  # what phases exchange goes through Streaming Memory
    ways = 2 if settings.is_training else 1
    if settings.is_pipelined:
        return ways * cycles_of_pipeline * max(stage.copy for stage in stages)
    return ways * settings.micro_batches * sum(stage.copy for stage in stages)


def cell_parts(
    cell: Cell,
    ipu: int,
    stages: Sequence[StageCycles],
    placement: Placement,
    settings: Settings,
) -> list[tuple[str, float]]:
    """Return the work of an IPU in a cell of the schedule: names and cycles of its parts, in order.

    If I/O tiles load the inputs, the transfer has 0 cycles: it takes no time of the other tiles.
    """
    own = [s for s, where in zip(stages, placement.ipus, strict=True) if where == ipu]
    if cell.action == "idle":
        return []
    if cell.action == "update":
        return [("update", sum(s.update for s in own))]
    if cell.stage is None:
        return [("reduce", sum(s.all_reduce for s in own))]
    here = stages[cell.stage]
    if cell.action == "forward":
        transfer = 0.0 if settings.overlaps_io else here.receive
        return [("transfer", transfer), ("load", here.offload), ("forward", here.forward)]
    if cell.action == "recompute":
        return [("recompute", here.recompute)]
    return [("backward", here.backward)] if cell.action == "backward" else [("load", here.load)]


def _times_of(
    cell: Cell,
    ipu: int,
    stages: Sequence[StageCycles],
    placement: Placement,
    settings: Settings,
) -> list[float]:
    return [taken for _, taken in cell_parts(cell, ipu, stages, placement, settings)]


def stage_cycles(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    index: int,
    model: CycleModel = CYCLE_MODEL,
) -> StageCycles:
    """Return what one stage takes for one micro-batch."""
    stage = stage_of(graph, placement, settings, ipu, index)
    device = _Device(stage, ipu, model)
    again: list[Operation] = []
    if index in settings.recomputing(placement):
        keeps = kept(stage, settings.recompute_for(placement))
        again = [o for segment in segments(stage, keeps) for o in segment.again]
    weights = placement.weights_of(graph, index)
    copied = copied_bytes(graph, placement, index)
    link = ipu.link_bandwidth / 2 / ipu.clock
    streaming = (ipu.streaming_bandwidth or ipu.host_bandwidth) / ipu.clock
    received = 0 if settings.synthetic_data else received_bytes(graph, placement, index)
    arriving = sum(graph.root_bytes[root] for root in stage.incoming)
    return StageCycles(
        forward=sum(map(device.forward, stage.operations)),
        recompute=sum(map(device.forward, again)),
        backward=sum(map(device.backward, stage.operations)) if settings.is_training else 0.0,
        receive=received * ipu.clock / model.host_bandwidth,
        copy=copied / link,
        load=(arriving + sum(weight.bytes for weight in weights)) / streaming,
        offload=_offloaded_bytes(stage, placement, index, weights) / streaming,
        update=device.update(weights) + streamed_bytes(weights, settings) / streaming,
        all_reduce=all_reduce_bytes(weights, settings) / link,
    )


def _offloaded_bytes(
    stage: Stage, placement: Placement, index: int, weights: tuple[Weight, ...]
) -> int:
    """Return the bytes of a micro-batch from and to Streaming Memory, not in phases."""
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
    """Return what the forward and the backward of each operation take for one micro-batch."""
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
    """The rates of an IPU for one stage."""

    stage: Stage
    ipu: IPU
    model: CycleModel

    def forward(self, operation: Operation) -> float:
        return self._pass(operation, backward=False)

    def backward(self, operation: Operation) -> float:
        """The gradient of what was read; weights' gradients are added to their accumulators."""
        added = 0
        if self.stage.settings.accumulation > 1:
            width = 2 * BYTES[self.stage.settings.optimizer.accumulator]
            added = width * sum(w.elements for w in self._trained(operation))
        return self._pass(operation, backward=True) + self._moved(added)

    def update(self, weights: tuple[Weight, ...]) -> float:
        """Weights, gradients and state are read, weights and state written."""
        optimizer = self.stage.settings.optimizer
        trained = [weight for weight in weights if weight.is_trained]
        state = sum(BYTES[type_] for type_ in optimizer.state)
        size = sum(
            w.elements * (2 * BYTES[w.type] + 2 * state + BYTES[optimizer.accumulator])
            for w in trained
        )
        return self._moved(size) + self.model.operation_cycles * len(trained)

    def _trained(self, operation: Operation) -> list[Weight]:
        weights = (self.stage.graph.weight_of[name] for name in operation.weights)
        return [weight for weight in weights if weight.is_trained]

    def _moved(self, size: float) -> float:
        """Return the cycles of reading and writing so many bytes in the tiles' memory."""
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
        # Statistics are a pass of their own over the same values.
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
                continue  # nothing trained stands before it
            held = working_set(shape, operands, partials, stage.tiles)
            parts = max(operation.product.serial if operation.product else 1, -(-held // limit))
            total += shape.flops / rate
            total += shape.repeats * held / (stage.tiles * self.ipu.exchange_rate)
            launched = self.model.operation_cycles + (parts - 1) * self.model.part_cycles
            total += shape.repeats * launched
        return total


# How often an operation goes over its values.
_PASSES: Final[Mapping[str, int]] = {"norm": 3, "softmax": 3, "loss": 2}
