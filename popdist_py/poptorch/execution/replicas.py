"""How the local replicas of one instance run a micro-batch each: one after the other, or at once.

``LoopReplicas`` defines the result; every other back end of ``backends.py`` must agree with it.
Gradients end in the ``grad`` of the device parameters, added up over the replicas.
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
from popdist_py.poptorch.group_norms.exchange import GroupExchange
from popdist_py.poptorch.group_norms.turns import OneEnded, in_turns
from popdist_py.poptorch.tracing.first_forward import FirstForward
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.tracing.losses import Losses
from popdist_py.poptorch.update.gradients import Gradients
from popdist_py.poptorch.weights.device_state import DeviceState
from popdist_py.timeline import spans

__all__ = ["DeviceModel", "Forward", "FusedReplicas", "LoopReplicas", "Outputs", "Replicas"]

# For each output tensor of the model, the values of all local replicas.
Outputs = Sequence[Values]
# Runs the model on the arguments of a call, with the tensors of one micro-batch in their places.
Forward = Callable[[Call, Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """A model as the replica back ends know it.

    Attributes:
        forward: runs the model.
        context: where it runs.
        first_forward: what the first forward showed.
        batching: how replicas share inputs.
        streams: the random numbers of each replica.
        first_replica: global index of the first local replica.
        gradients: where the backward's results go; None for inference.
        trained: the parameters that are updated.
        only_loop: why replicas have to run as the model is written, one after the other; None if
            they need not.
        norm_groups: what groups of replicas tell one another for their batch norms; None if each
            replica is a group of its own.
        aligned_inputs: copy every micro-batch to a memory address of its own: the bits of a matrix
            product depend on where in a cache line its operands begin.
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
        """The device's tensors."""
        return self.context.state

    @property
    def training(self) -> bool:
        """Whether the backward runs."""
        return self.context.training

    def run(self, call: Call, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Run the forward; return the output tensors and the loss (None for inference)."""
        with spans.row_span(spans.DEVICE, "forward"):
            return self._forward(call, tensors)

    def _forward(
        self, call: Call, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any]:
        self.state.restore_constants()
        leaves: list[torch.Tensor] = []
        if self.training and self.first_forward.loss_output is None:
            losses = Losses()
            with ForwardWatch(losses=losses).following():
                flatten(self.forward(call, tensors), leaves)
            return leaves, losses.final()
        flatten(self.forward(call, tensors), leaves)
        return leaves, leaves[self.first_forward.loss_output or 0] if self.training else None

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times the gradients of ``loss`` to those of the parameters."""
        if not loss.requires_grad:
            return
        if self.state.gradient_hooks is not None:
            self.state.gradient_hooks.scale = scale
        with spans.row_span(spans.DEVICE, "backward"):
            if self.norm_groups is not None:
                # torch's own calls leave all modes, but what recomputes runs batch norms again.
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
        """Return outputs without graph, and without memory that a later step changes."""
        return [
            leaf.detach().clone() if shared else leaf.detach()
            for leaf, shared in zip(leaves, self.first_forward.shared, strict=True)
        ]

    def run_as_written(self, call: Call, inputs: Sequence[torch.Tensor], number: int) -> None:
        """Run the forward of each replica only to raise its error; no state changes remain.

        It is called after a captured graph has failed: the error then shows the program's lines.
        """
        state, random = self.state, torch.get_rng_state()
        kept = [rows.clone() for rows in self._changing_buffers()]
        try:
            with self.context.enter(), state.contents_kept():
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
    """Runs one micro-batch on each local replica.

    Attributes:
        needs_context: whether ``run`` has to be called inside the model's context; if not, it need
            not be, which saves time.
    """

    needs_context: bool

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the forward, and the backward of a training model.

        Args:
            call: the arguments that the inputs are part of.
            inputs: a combined micro-batch of each input, [replica groups x micro-batch, ...].
            number: of this micro-batch since the start, for random streams.
            scale: factor on the gradients.
        """


class LoopReplicas:
    """One replica after the other."""

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the replicas in order."""
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
        """Run one local replica on its own inputs; return its output tensors."""
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
    """Run the replicas so that all come to a batch norm before one goes on.

    Raises:
        Error: they do not all run the same batch norms.
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
    """What a replica has to find again: the attributes that its forward changes, its numbers."""

    attributes: Sequence[Any]
    random: torch.Tensor | None


class _Turns:
    """Lets replicas that run in turns have what is theirs.

    Args:
        model: what runs.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._left: dict[int, _Left] = {}

    def resumed(self, replica: int) -> None:
        """Give a replica its gradients and what it left; one that begins has the rest to do."""
        model, left = self._model, self._left.get(replica)
        if model.gradients is not None:
            model.gradients.select_replica(replica)
        if left is None:
            return
        model.state.select(replica, model.first_replica + replica)
        model.state.put_attributes(left.attributes)
        if left.random is not None:
            torch.set_rng_state(left.random)

    def paused(self, replica: int) -> None:
        """Keep what a replica leaves; its backward may be at work."""
        model = self._model
        random = torch.get_rng_state() if model.first_forward.is_random else None
        self._left[replica] = _Left(model.state.changing_attributes(), random)
        if model.gradients is not None:
            model.gradients.collect()


class FusedReplicas:
    """All local replicas in one vectorised pass, with one backward that adds their gradients."""

    needs_context = True

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._places = model.state.stacked_buffers()

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the replicas at once."""
        model, replicas = self._model, self._model.batching.replicas
        stacked = [model.batching.stacked(tensor) for tensor in inputs]
        buffers = [stack for _, _, stack in self._places]
        run = torch.func.vmap(partial(self._run_one, call), randomness="different")
        if not stacked and not buffers:
            raise RuntimeError("the model takes no inputs")
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
        """The forward of all replicas, written as that of one."""
        for (place, key, _), buffer in zip(self._places, buffers, strict=True):
            place[key] = buffer
        leaves, loss = self._model.run(call, tensors)
        # A leaf that is state or an input is returned by value, as in the loop.
        results = [
            leaf.clone() if shared else leaf
            for leaf, shared in zip(leaves, self._model.first_forward.shared, strict=True)
        ]
        return results, leaves[0].new_zeros(()) if loss is None else loss
