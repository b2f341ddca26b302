"""How the local replicas of one instance run a micro-batch each: one after the other, or at once.

``LoopReplicas`` defines the result; ``FusedReplicas`` must agree with it. Gradients end in the
``grad`` of the device parameters, added up over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from popdist_py.poptorch.calls.batching import Batching, Values
from popdist_py.poptorch.calls.nested_values import flatten
from popdist_py.poptorch.execution.losses import LossRecorder
from popdist_py.poptorch.execution.random_streams import RandomStreams
from popdist_py.poptorch.execution.trace import Trace
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["FusedReplicas", "LoopReplicas", "Model", "Outputs", "Replicas"]

# For each output tensor of the model, that of every local replica.
Outputs = Sequence[Values]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What both ways of running replicas need to know.

    Attributes:
        forward: runs the model on the tensors of one micro-batch.
        state: the device's tensors.
        trace: what the first forward showed.
        batching: how replicas share inputs.
        streams: the random numbers of each replica.
        training: whether the backward runs.
        first_replica: global index of the first local replica.
        gradients: where the backward's results go; None for inference.
        aligned_inputs: copy every micro-batch to a memory address of its own: the bits of a matrix
            product depend on where in a cache line its operands begin.
    """

    forward: Callable[[Sequence[torch.Tensor]], Any]
    state: DeviceState
    trace: Trace
    batching: Batching
    streams: RandomStreams
    training: bool
    first_replica: int
    gradients: Gradients | None
    aligned_inputs: bool = False

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Run the forward; return the output tensors and the loss (None for inference)."""
        self.state.restore_constants()
        leaves: list[torch.Tensor] = []
        if self.training and self.trace.loss_output is None:
            with LossRecorder() as recorder:
                flatten(self.forward(tensors), leaves)
            return leaves, recorder.final()
        flatten(self.forward(tensors), leaves)
        return leaves, leaves[self.trace.loss_output or 0] if self.training else None

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times the gradients of ``loss`` to those of the parameters."""
        if not loss.requires_grad:
            return
        if scale == 1.0 and loss.dim() == 0:
            loss.backward()
        else:
            loss.backward(torch.full_like(loss, scale))

    def leaving(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return outputs without graph, and without memory that a later step changes."""
        return [
            leaf.detach().clone() if shared else leaf.detach()
            for leaf, shared in zip(leaves, self.trace.shared, strict=True)
        ]


class Replicas(Protocol):
    """Runs one micro-batch on each local replica."""

    def run(self, slabs: Sequence[torch.Tensor], step: int, scale: float) -> Outputs:
        """Run the forward, and the backward of a training model.

        Args:
            slabs: the inputs, [replica groups x micro-batch, ...].
            step: number of this micro-batch since the start, for random streams.
            scale: factor on the gradients.
        """


class LoopReplicas:
    """One replica after the other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        batching = model.batching
        self._groups = [batching.group_of(replica) for replica in range(batching.replicas)]
        self._num_groups = batching.num_groups

    def run(self, slabs: Sequence[torch.Tensor], step: int, scale: float) -> Outputs:
        """Run the replicas in order."""
        results = [
            self.run_one(replica, tensors, step, scale)
            for replica, tensors in enumerate(self.inputs(slabs))
        ]
        return list(zip(*results, strict=True))

    def inputs(self, slabs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the input tensors of each replica."""
        if self._num_groups == 1:
            return [list(slabs)] * len(self._groups)
        parts = [slab.split(slab.shape[0] // self._num_groups) for slab in slabs]
        return [[part[group] for part in parts] for group in self._groups]

    def run_one(
        self, replica: int, tensors: Sequence[torch.Tensor], step: int, scale: float
    ) -> list[torch.Tensor]:
        """Run one replica."""
        model = self._model
        if model.trace.is_random:
            model.streams.seed(model.first_replica + replica, step)
        if model.state.has_own_tensors:
            model.state.select(replica, model.first_replica + replica)
        if model.aligned_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        elif model.trace.changed_inputs:
            tensors = [tensor.detach() for tensor in tensors]
        leaves, loss = model.run(tensors)
        if loss is not None and model.gradients is not None:
            model.gradients.enter(replica)
            model.backward(loss, scale)
            model.gradients.leave(replica)
        return model.leaving(leaves)


class FusedReplicas:
    """All local replicas in one vectorised pass, with one backward that adds their gradients."""

    def __init__(self, model: Model) -> None:
        self._model = model
        batching = model.batching
        groups = [batching.group_of(replica) for replica in range(batching.replicas)]
        self._groups = None if batching.group_size == 1 else torch.tensor(groups)
        self._places = model.state.stacked_buffers()

    def run(self, slabs: Sequence[torch.Tensor], step: int, scale: float) -> Outputs:
        """Run the replicas at once."""
        model, replicas = self._model, self._model.batching.replicas
        stacked = [self._stack(slab) for slab in slabs]
        buffers = [stack for _, _, stack in self._places]
        run = torch.func.vmap(self._run_one, randomness="different")
        if not stacked and not buffers:
            raise RuntimeError("the model takes no inputs")
        if model.trace.is_random:
            first = model.first_replica
            with model.streams.vectorised(range(first, first + replicas), step):
                leaves, loss = run(stacked, buffers)
        else:
            leaves, loss = run(stacked, buffers)
        if model.training:
            model.backward(loss, scale)
        return [leaf.detach() for leaf in leaves]

    def _stack(self, slab: torch.Tensor) -> torch.Tensor:
        groups = self._model.batching.num_groups
        tensor = slab.view(groups, slab.shape[0] // groups, *slab.shape[1:])
        return tensor if self._groups is None else tensor[self._groups]

    def _run_one(
        self, tensors: list[torch.Tensor], buffers: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The forward of all replicas, written as that of one."""
        for (place, key, _), buffer in zip(self._places, buffers, strict=True):
            place[key] = buffer
        leaves, loss = self._model.run(tensors)
        # A leaf that is state or an input is returned by value, as in the loop.
        results = [
            leaf.clone() if shared else leaf
            for leaf, shared in zip(leaves, self._model.trace.shared, strict=True)
        ]
        return results, leaves[0].new_zeros(()) if loss is None else loss
