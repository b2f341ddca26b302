"""Replica back ends, which are classes that run one micro-batch on each replica of this instance.

``LoopReplicas`` runs the replicas one after the other and defines the correct result. Every other
back end in ``backends.py`` must return the same result as ``LoopReplicas``. Back ends add the
gradients of all replicas and store the sum in ``grad`` of the device's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import _engine_run_backward

from popdist_py.poptorch.calls.batching import Batching, Values
from popdist_py.poptorch.calls.nested_values import Call, flatten
from popdist_py.poptorch.execution.batch_folding import folded_batches
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.random_streams import RandomStreams
from popdist_py.poptorch.group_norms.replica_scheduler import OneEnded, in_turns
from popdist_py.poptorch.group_norms.statistics_exchange import GroupExchange
from popdist_py.poptorch.tracing.first_forward import FirstForward
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.tracing.losses import Losses
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.weights.device_state import DeviceState
from popdist_py.timeline import spans

__all__ = ["DeviceModel", "Forward", "FusedReplicas", "LoopReplicas", "Outputs", "Replicas"]

# For each output tensor of the model, a list with the output tensor of every local replica.
Outputs = Sequence[Values]
# A function that runs the model with the arguments of a call, but with the tensors of one
# micro-batch in place of the call's tensors.
Forward = Callable[[Call, Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """The properties of a compiled model that the replica back ends need.

    Attributes:
        forward: The function that runs the model.
        context: The context managers inside which the forward pass runs.
        first_forward: The facts about the model that were found when its first forward pass was
            traced, such as the buffers that the forward pass changes.
        batching: The numbers that determine how a call's samples are divided into micro-batches.
        streams: The random streams of the replicas.
        first_replica: The global index of the first replica on this instance.
        gradients: The object that accumulates gradients; None for inference.
        trained: The parameters that the optimiser updates.
        only_loop: The reason why only ``LoopReplicas`` can run the model, as a text; None if other
            back ends can run the model.
        norm_groups: The object that exchanges batch norm statistics between the replicas of a norm
            group; None if every replica uses only its own batch norm statistics.
        aligned_inputs: Whether every micro-batch is copied to new memory, which is aligned to cache
            lines. The bits of a matrix product depend on the alignment of its operands in memory.
    """

    forward: Forward
    context: DeviceContext
    first_forward: FirstForward
    batching: Batching
    streams: RandomStreams
    first_replica: int
    gradients: Gradients | None
    trained: Sequence[torch.Tensor] = ()
    only_loop: str | None = None
    norm_groups: GroupExchange | None = None
    aligned_inputs: bool = False

    @property
    def state(self) -> DeviceState:
        """The object that stores the device's tensors of the model."""
        return self.context.state

    @property
    def training(self) -> bool:
        """Whether a backward pass follows the forward pass."""
        return self.context.training

    def run(self, call: Call, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Run the forward pass, and return the output tensors and the loss (None for inference)."""
        with spans.row_span(spans.DEVICE, "forward"):
            return self._forward(call, tensors)

    def _forward(
        self, call: Call, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any]:
        self.state.attributes.restore()
        leaves: list[torch.Tensor] = []
        if self.training and self.first_forward.loss_output is None:
            losses = Losses()
            with ForwardWatch(losses=losses).following():
                flatten(self.forward(call, tensors), leaves)
            return leaves, losses.final()
        flatten(self.forward(call, tensors), leaves)
        return leaves, leaves[self.first_forward.loss_output or 0] if self.training else None

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        """Run the backward pass, and add the gradients times ``scale`` to the parameters' ``grad``.

        If the loss does not require a gradient, the method ``backward`` does nothing.
        """
        if not loss.requires_grad:
            return
        if self.state.gradient_hooks is not None:
            self.state.gradient_hooks.scale = scale
        with spans.row_span(spans.DEVICE, "backward"):
            if self.norm_groups is not None:
                # Activation checkpointing runs batch norms again in the backward pass, and these
                # batch norms need the mode ``GroupNorms``, which exchanges statistics between
                # replicas. A call of ``loss.backward()`` would run without torch function modes.
                gradients = (torch.full_like(loss, scale),)
                _engine_run_backward(
                    (loss,), gradients, False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
            elif scale == 1.0 and loss.dim() == 0:
                loss.backward()
            else:
                loss.backward(torch.full_like(loss, scale))

    def leaving(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors of a forward pass, detached from autograd.

        ``leaving`` copies an output tensor if a later micro-batch could change the memory of the
        output.
        """
        return [
            leaf.detach().clone() if shared else leaf.detach()
            for leaf, shared in zip(leaves, self.first_forward.shared, strict=True)
        ]

    def run_as_written(self, call: Call, inputs: Sequence[torch.Tensor], number: int) -> None:
        """Run each replica's forward pass to raise its error, and undo all changes of the state.

        ``run_as_written`` is called after a recorded graph of the model's operations has failed.
        The traceback of an error in the forward pass shows the lines of the user's program. The
        traceback of an error in the recorded graph does not show the lines of the user's program.
        """
        state, random = self.state, torch.get_rng_state()
        kept = [rows.clone() for rows in self._changing_buffers()]
        try:
            with self.context.enter(), state.attributes.contents_kept():
                for replica, tensors in enumerate(self.batching.inputs_of_replicas(inputs)):
                    self.streams.seed(self.first_replica + replica, number)
                    if state.has_own_tensors:
                        state.select(replica, self.first_replica + replica)
                    self._forward(call, [tensor.detach().clone() for tensor in tensors])
        finally:
            torch.set_rng_state(random)
            with torch.no_grad():
                for rows, before in zip(self._changing_buffers(), kept, strict=True):
                    rows.copy_(before)

    def _changing_buffers(self) -> list[torch.Tensor]:
        return list(self.state.buffers_of_replicas(self.first_forward.modified_buffers).values())


class Replicas(Protocol):
    """The interface of replica back ends, which run one micro-batch on each local replica.

    Attributes:
        needs_context: Whether ``run`` must be called inside the model's DeviceContext. The
            DeviceContext is not entered without need, because entering it takes time.
    """

    needs_context: bool

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the forward pass on all local replicas, and the backward pass of a training model.

        Args:
            call: The arguments of the call of the model.
            inputs: One tensor of the shape [replica groups x micro-batch, ...] for each input of
                the model. The tensor contains a micro-batch for each group of replicas that get the
                same inputs.
            number: The number of micro-batches that have run before. The random streams of the
                replicas depend on ``number``.
            scale: The factor that multiplies all gradients, such as the loss scale.
        """


class LoopReplicas:
    """The replica back end that runs one replica after the other."""

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the replicas of this instance one after the other, in the order of their indices."""
        each = [
            partial(self.run_one, replica, call, tensors, number, scale)
            for replica, tensors in enumerate(self._model.batching.inputs_of_replicas(inputs))
        ]
        groups = self._model.norm_groups
        if groups is None or len(each) == 1:
            results = [run() for run in each]
        else:
            results = _in_turns(self._model, groups, each)
        return list(zip(*results, strict=True))

    def run_one(
        self, replica: int, call: Call, tensors: Sequence[torch.Tensor], number: int, scale: float
    ) -> list[torch.Tensor]:
        """Run one local replica on its own inputs, and return its output tensors.

        Args:
            replica: The index of the replica on this instance.
            call: The arguments of the call of the model.
            tensors: The micro-batch of the replica, one tensor for each input.
            number: The number of micro-batches that have run before.
            scale: The factor that multiplies all gradients, such as the loss scale.
        """
        model = self._model
        if model.first_forward.is_random:
            model.streams.seed(model.first_replica + replica, number)
        if model.state.has_own_tensors:
            model.state.select(replica, model.first_replica + replica)
        if model.aligned_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        elif model.first_forward.changed_inputs:
            tensors = [tensor.detach() for tensor in tensors]
        leaves, loss = model.run(call, tensors)
        if loss is not None and model.gradients is not None:
            model.gradients.select_replica(replica)
            model.backward(loss, scale)
            model.gradients.collect()
        return model.leaving(leaves)


def _in_turns(
    model: DeviceModel,
    groups: GroupExchange,
    each: Sequence[Callable[[], list[torch.Tensor]]],
) -> list[list[torch.Tensor]]:
    """Run replicas so that each replica waits at every batch norm for all other replicas.

    Args:
        model: The compiled model that runs on every replica.
        groups: The object that exchanges batch norm statistics between the replicas of a norm
            group.
        each: One function for each replica, which runs the replica.

    Raises:
        Error: The replicas run different numbers of batch norms.
    """
    turns = _Turns(model)
    try:
        return in_turns(
            each, groups.answers, name="replica", resumed=turns.resumed, paused=turns.paused
        )
    except OneEnded as end:
        raise groups.missed(end.ended, end.waiting, end.value) from None


@dataclass(frozen=True, slots=True)
class _Left:
    """The module attributes and random generator state of a replica paused at a batch norm.

    Attributes:
        attributes: The values of the module attributes that the forward pass changes.
        random: The state of the random generator; None if the forward pass does not draw random
            numbers.
    """

    attributes: Sequence[Any]
    random: torch.Tensor | None


class _Turns:
    """Callbacks that save a replica's state when it pauses at a batch norm, and restore it later.

    Args:
        model: The compiled model that runs on every replica.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._left: dict[int, _Left] = {}

    def resumed(self, replica: int) -> None:
        """Select the gradients of a replica that continues, and restore the replica's saved state.

        A replica whose forward pass has not started yet does not have a saved state.
        """
        model, left = self._model, self._left.get(replica)
        if model.gradients is not None:
            model.gradients.select_replica(replica)
        if left is None:
            return
        model.state.select(replica, model.first_replica + replica)
        model.state.attributes.put_changed(left.attributes)
        if left.random is not None:
            torch.set_rng_state(left.random)

    def paused(self, replica: int) -> None:
        """Save the state and gradients of a replica, in its forward or backward pass."""
        model = self._model
        random = torch.get_rng_state() if model.first_forward.is_random else None
        self._left[replica] = _Left(model.state.attributes.changed_values(), random)
        if model.gradients is not None:
            model.gradients.collect()


class FusedReplicas:
    """The replica back end that runs all local replicas in one pass, vectorised with ``vmap``.

    A single backward pass computes the sum of the gradients of all replicas.
    """

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._places = model.state.stacked_buffers()

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run all replicas in one forward pass, and for training one backward pass."""
        model, replicas = self._model, self._model.batching.replicas
        stacked = [model.batching.stacked(tensor) for tensor in inputs]
        buffers = [stack for _, _, stack in self._places]
        run = torch.func.vmap(partial(self._run_one, call), randomness="different")
        if not stacked and not buffers:
            raise RuntimeError("the model has neither inputs nor buffers for each replica")
        with folded_batches():
            if model.first_forward.is_random:
                first = model.first_replica
                with model.streams.vectorised(range(first, first + replicas), number):
                    leaves, loss = run(stacked, buffers)
            else:
                leaves, loss = run(stacked, buffers)
        if model.training:
            model.backward(loss, scale)
        return [leaf.detach() for leaf in leaves]

    def _run_one(
        self, call: Call, tensors: list[torch.Tensor], buffers: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the forward pass inside ``vmap``, so that one call computes all replicas."""
        for (place, key, _), buffer in zip(self._places, buffers, strict=True):
            place[key] = buffer
        leaves, loss = self._model.run(call, tensors)
        # An output that shares memory with an input or with the model's weights and buffers is
        # copied, as in ``LoopReplicas``.
        results = [
            leaf.clone() if shared else leaf
            for leaf, shared in zip(leaves, self._model.first_forward.shared, strict=True)
        ]
        return results, leaves[0].new_zeros(()) if loss is None else loss
