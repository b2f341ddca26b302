"""The bytes that an IPU exchanges with the host, other IPUs and off-chip Streaming Memory.

The numbers of bytes are computed from the shapes of tensors. The numbers of bytes are exact, except
for the requests that tiles send to the host. The size of a request is inferred from one published
profile. Bytes that IPUs exchange for other purposes, such as profiling, are not counted. The module
``transfers`` does not compute the duration of transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Placement, Tensor, Weight
from popdist_py.ipu.settings import Location, Settings
from popdist_py.ipu.specification import IPU

__all__ = [
    "Traffic",
    "all_reduce_bytes",
    "copied_bytes",
    "copied_gradients",
    "fetched_bytes",
    "host_traffic",
    "received_bytes",
    "receiving_stages",
    "request_bytes",
    "streamed_bytes",
]

# The bytes of the request that a tile sends to the host for a transfer. A tile sends one request
# for each tensor of a micro-batch that the tile reads from the host or sends to the host.
# ``_REQUEST`` is inferred from a published profile of ResNet-101 on two Mk2 IPUs. The first IPU
# reads images and does not send outputs, but it sends 51.8, 138 and 552 kB (of 1,024 bytes) in 3, 8
# and 32 micro-batches. These bytes are equal to 12 bytes for each of the IPU's 1,472 tiles and each
# micro-batch.
_REQUEST: Final = 12
# The bytes of the smallest part of a tensor that a tile exchanges with the host. ``_LEAST_BYTES``
# is inferred from a published profile of ResNet-101 on two Mk2 IPUs. The second IPU returns outputs
# of 128,002 bytes, and sends 141 or 142 kB including its requests. Every value of ``_LEAST_BYTES``
# from 93 to 97 agrees with the profile.
_LEAST_BYTES: Final = 96


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that one IPU receives from the host and sends to the host in one call."""

    received: int
    sent: int


def host_traffic(graph: Graph, placement: Placement, settings: Settings) -> tuple[Traffic, ...]:
    """Return the bytes that each IPU exchanges with the host in one call of the model."""
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
    """Return the bytes that a stage receives from the host for one micro-batch.

    The host sends each input of the model only to the first stage that reads the input.
    """
    return sum(graph.bytes_of(t.name) for t in _inputs_of(graph, placement, stage))


def receiving_stages(graph: Graph, placement: Placement) -> int:
    """Return the number of stages that receive inputs of the model from the host."""
    return len(set(_first_stages(graph, placement).values()))


def request_bytes(
    graph: Graph, placement: Placement, settings: Settings, ipu: IPU
) -> tuple[int, ...]:
    """Return the bytes of the requests that each IPU sends to the host in one call of the model.

    A tile sends one request for each tensor, if the tile stores a part of the tensor and the host
    sends or receives the tensor.
    """
    sent = [0] * placement.num_ipus
    if settings.synthetic_data:
        return tuple(sent)
    tiles = settings.io_tiles if settings.overlaps_io else ipu.tiles - settings.io_tiles

    def requests(name: str) -> int:
        return _REQUEST * min(tiles, -(-graph.bytes_of(name) // _LEAST_BYTES))

    for stage, where in enumerate(placement.ipus):
        for tensor in _inputs_of(graph, placement, stage):
            sent[where] += settings.micro_batches * requests(tensor.name)
    made = _stage_of_tensor(graph, placement)
    for name in set(graph.outputs) - {tensor.name for tensor in graph.inputs}:
        sent[placement.ipus[made[name]]] += settings.returned_micro_batches * requests(name)
    return tuple(sent)


def _inputs_of(graph: Graph, placement: Placement, stage: int) -> Iterator[Tensor]:
    """Yield the inputs of the model that ``stage`` reads and no earlier stage reads."""
    first = _first_stages(graph, placement)
    return (tensor for tensor in graph.inputs if first.get(tensor.name) == stage)


def _first_stages(graph: Graph, placement: Placement) -> dict[str, int]:
    """Return a mapping from the name of each model input to the first stage that reads it."""
    readers = ((tensor.name, graph.readers.get(tensor.name)) for tensor in graph.inputs)
    return {name: placement.stages[found[0]] for name, found in readers if found}


def copied_bytes(graph: Graph, placement: Placement, stage: int) -> int:
    """Return the bytes of activations that a stage sends to other IPUs for one micro-batch.

    In training, the other IPUs send back gradients, see ``copied_gradients``.
    """
    return sum(graph.root_bytes[root] for root in _copied_roots(graph, placement, stage))


def copied_gradients(graph: Graph, placement: Placement, stage: int) -> int:
    """Return the bytes of gradients that other IPUs send to a stage for one micro-batch.

    A tensor that does not depend on a trained weight, such as an attention mask, has no gradient.
    """
    roots = _copied_roots(graph, placement, stage) & graph.gradient_roots
    return sum(graph.root_bytes[root] for root in roots)


def _copied_roots(graph: Graph, placement: Placement, stage: int) -> set[str]:
    stages, ipus = placement.stages, placement.ipus
    return {
        graph.root_of[operation.output.name]
        for operation in placement.operations_of(graph, stage)
        if any(
            ipus[stages[reader]] != ipus[stage]
            for reader in graph.readers.get(operation.output.name, ())
        )
    }


def all_reduce_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes that a replica sends in a ring all-reduce of the weights' gradients."""
    replicas = settings.replicas
    size = BYTES[settings.gradient_type]
    gradients = sum(weight.elements for weight in weights if weight.is_trained) * size
    return 2 * gradients * (replicas - 1) // replicas


def streamed_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes that one update of the weights moves from and to Streaming Memory."""
    optimizer = settings.optimizer
    total = 0
    for weight in weights:
        if weight.is_trained:
            width = sum(BYTES[type_] for type_ in optimizer.state)
            total += 2 * width * _off_chip(weight, settings.state_location, settings)
            width = BYTES[weight.type]
            total += 2 * width * _off_chip(weight, settings.weight_location, settings)
    return total


def fetched_bytes(weights: tuple[Weight, ...], settings: Settings) -> int:
    """Return the bytes of weights and accumulators that a micro-batch moves to or from the IPU.

    Only weights and gradient accumulators that are stored in Streaming Memory (DRAM outside the
    IPU) are counted. The IPU fetches weights from Streaming Memory for the forward pass and again
    for the backward pass. The IPU also fetches gradient accumulators from Streaming Memory and
    writes them back.
    """
    optimizer, total = settings.optimizer, 0
    for weight in weights:
        passes = 2 if settings.is_training else 1
        total += passes * BYTES[weight.type] * _off_chip(weight, settings.weight_location, settings)
        if weight.is_trained and settings.has_accumulators:
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
