"""Bytes between an IPU and the host, other IPUs, other replicas and Streaming Memory.

Exact where shapes tell: what programs add of their own (profiling, say) is not in it.
Nothing here knows how long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.graph import BYTES, Graph, Placement, Weight
from popdist_py.ipu.settings import Location, Settings

__all__ = [
    "Traffic",
    "all_reduce_bytes",
    "copied_bytes",
    "fetched_bytes",
    "host_traffic",
    "received_bytes",
    "streamed_bytes",
]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one IPU during one call: from the host, and to it."""

    received: int
    sent: int


def host_traffic(graph: Graph, placement: Placement, settings: Settings) -> tuple[Traffic, ...]:
    """Return what each IPU of a replica gets from the host and sends there in one call."""
    received, sent = [0] * placement.num_ipus, [0] * placement.num_ipus
    if settings.synthetic_data:
        return tuple(map(Traffic, received, sent))
    for stage, ipu in enumerate(placement.ipus):
        received[ipu] += settings.micro_batches * received_bytes(graph, placement, stage)
    times = settings.returned_micro_batches
    inputs = {tensor.name for tensor in graph.inputs}
    made = _stage_of_tensor(graph, placement)
    for name in set(graph.outputs) - inputs:
        sent[placement.ipus[made[name]]] += times * graph.bytes_of(name)
    return tuple(map(Traffic, received, sent))


def received_bytes(graph: Graph, placement: Placement, stage: int) -> int:
    """Return the bytes from the host of a micro-batch: each input goes to its first reader."""
    first: dict[str, int] = {}
    for operation, where in zip(graph.operations, placement.stages, strict=True):
        for name in operation.inputs:
            first.setdefault(name, where)
    return sum(graph.bytes_of(t.name) for t in graph.inputs if first.get(t.name) == stage)


def copied_bytes(graph: Graph, placement: Placement, stage: int) -> int:
    """Return the bytes of a micro-batch that later stages on other IPUs read of a stage.

    As many come back as gradients, those of integers left out.
    """
    made = _stage_of_tensor(graph, placement)
    read: set[str] = set()
    for operation, where in zip(graph.operations, placement.stages, strict=True):
        if placement.ipus[where] != placement.ipus[stage]:
            read |= {name for name in operation.inputs if made[name] == stage}
    return sum(graph.root_bytes[root] for root in {graph.root_of[name] for name in read})


def all_reduce_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes that a replica sends for the sum of all gradients: a ring's share."""
    replicas = settings.replicas
    size = BYTES[settings.optimizer.accumulator]
    gradients = sum(weight.elements for weight in weights if weight.is_trained) * size
    return 2 * gradients * (replicas - 1) // replicas


def streamed_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes from and to Streaming Memory of an update: what lies there, both ways."""
    optimizer = settings.optimizer
    total = 0
    for weight in weights:
        if weight.is_trained:
            width = sum(BYTES[type_] for type_ in optimizer.state)
            total += 2 * width * _off_chip(weight, settings.optimizer_location, settings)
            width = BYTES[weight.type]
            total += 2 * width * _off_chip(weight, settings.weight_location, settings)
    return total


def fetched_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes from and to Streaming Memory of a micro-batch, activations left out.

    Weights that lie there come for the forward and for the backward; accumulators come and go.
    """
    optimizer, total = settings.optimizer, 0
    for weight in weights:
        passes = 2 if settings.is_training else 1
        total += passes * BYTES[weight.type] * _off_chip(weight, settings.weight_location, settings)
        if settings.is_training and weight.is_trained and settings.accumulation > 1:
            width = BYTES[optimizer.accumulator]
            where = settings.accumulator_location
            total += 2 * width * _off_chip(weight, where, settings)
    return total


def _off_chip(weight: Weight, where: Location, settings: Settings) -> int:
    if not where.is_off_chip(weight.elements):
        return 0
    return where.part(weight.elements, settings.replicas)


def _stage_of_tensor(graph: Graph, placement: Placement) -> dict[str, int]:
    made = {tensor.name: -1 for tensor in graph.inputs}
    for operation, where in zip(graph.operations, placement.stages, strict=True):
        made[operation.output.name] = where
    return made
