"""Replicas as one captured graph: forward, backward and nothing of Python between the operations.

A third way of running replicas, which must agree with the loop like the others. What is recorded
is what one forward and its backward do, so Python code in a forward runs while compiling only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from popdist_py.poptorch.execution.batch_folding import folded_batches
from popdist_py.poptorch.execution.graph_code import function_of
from popdist_py.poptorch.execution.replicas import LoopReplicas, Model, Outputs

__all__ = ["GraphReplicas"]


class GraphReplicas:
    """Runs a captured graph: once for all replicas, or once for each.

    Args:
        model: what runs.
        parameters: the device parameters that are trained; none for inference.
        slabs: inputs of one micro-batch of all replicas, as examples.
        vectorised: one graph for all local replicas instead of one for each.

    Raises:
        RuntimeError: what the model does cannot be captured.
    """

    def __init__(
        self,
        model: Model,
        parameters: Sequence[torch.Tensor],
        slabs: Sequence[torch.Tensor],
        *,
        vectorised: bool,
    ) -> None:
        self._model = model
        self._vectorised = vectorised
        self._loop = LoopReplicas(model)
        self._trained = list(parameters)
        own = model.state.stacked_buffers() if model.batching.replicas > 1 else []
        self._stacks = list({id(stack): stack for _, _, stack in own}.values())
        stacked = {id(place[key]) for place, key, _ in own}
        state = [*model.state.parameters.values(), *model.state.buffers.values()]
        trained = {id(parameter) for parameter in self._trained}
        self._fixed = [t for t in state if id(t) not in trained and id(t) not in stacked]
        self._own = own
        groups = [model.batching.group_of(r) for r in range(model.batching.replicas)]
        self._groups = torch.tensor(groups) if model.batching.group_size > 1 else None
        self._state = [*self._trained, *self._fixed]
        self._scale, self._factor = 1.0, torch.ones((), dtype=torch.float64)
        self._num_outputs = 0
        self._copied: list[bool] = []
        self._graph = self._capture(slabs)

    # -- capturing ----------------------------------------------------------------------------

    def _capture(self, slabs: Sequence[torch.Tensor]) -> Callable[..., list[Any]]:
        if self._vectorised:
            buffers: Sequence[torch.Tensor] = self._stacks
            inputs = self._stacked_inputs(slabs)
        else:
            buffers = [stack[0] for stack in self._stacks]
            inputs = self._loop.inputs(slabs)[0]
        examples = [*self._trained, *self._fixed, *buffers, *inputs]
        examples = [tensor.detach().clone() for tensor in examples] + [
            torch.ones((), dtype=torch.float64)
        ]
        with torch.enable_grad(), _without_onednn():
            module = make_fx(self._joint)(*examples)
        graph = function_of(module, self._num_outputs)
        gradients: list[torch.Tensor | None] = [None] * len(self._trained)
        with torch.no_grad():
            outputs = graph(*examples, gradients.__setitem__)
        self._copied = _not_alone([*outputs, *gradients], examples)[self._num_outputs :]
        return graph

    def _joint(self, *flat: torch.Tensor) -> list[Any]:
        """Return the outputs and the gradients, for arguments in the order of the examples."""
        sizes = (len(self._trained), len(self._fixed), len(self._stacks))
        ends = [sum(sizes[: n + 1]) for n in range(3)]
        trained, fixed = flat[: ends[0]], flat[ends[0] : ends[1]]
        buffers, inputs, scale = flat[ends[1] : ends[2]], flat[ends[2] : -1], flat[-1]
        weights = [tensor.detach().requires_grad_(self._model.training) for tensor in trained]
        shown = dict(zip(map(id, self._trained), weights, strict=True))
        shown.update(zip(map(id, self._fixed), fixed, strict=True))
        with self._model.state.substituted(shown):
            if self._vectorised:
                run = torch.func.vmap(self._one)
                with folded_batches():
                    outputs, loss = run(list(buffers), list(inputs))
            else:
                outputs, loss = self._one(list(buffers), list(inputs))
        self._num_outputs = len(outputs)
        results = [output.detach() for output in outputs]
        if not self._model.training:
            return results
        gradients = torch.autograd.grad(
            loss, weights, scale.to(loss.dtype).expand_as(loss), allow_unused=True
        )
        return [*results, *gradients]

    def _one(
        self, buffers: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The forward of one replica."""
        by_stack = dict(zip(map(id, self._stacks), buffers, strict=True))
        for place, key, stack in self._own:
            place[key] = by_stack[id(stack)]
        leaves, loss = self._model.run(inputs)
        results = [
            leaf.clone() if shared else leaf
            for leaf, shared in zip(leaves, self._model.trace.shared, strict=True)
        ]
        return results, leaves[0] if loss is None else loss

    def _stacked_inputs(self, slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        groups = self._model.batching.num_groups
        views = [slab.view(groups, slab.shape[0] // groups, *slab.shape[1:]) for slab in slabs]
        return views if self._groups is None else [view[self._groups] for view in views]

    # -- running ------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, slabs: Sequence[torch.Tensor], step: int, scale: float) -> Outputs:
        """Run the replicas."""
        if scale != self._scale:
            self._scale, self._factor = scale, torch.tensor(scale, dtype=torch.float64)
        factor, state = self._factor, self._state
        if self._vectorised:
            inputs = self._stacked_inputs(slabs)
            return self._graph(*state, *self._stacks, *inputs, factor, self._arrived)
        each = [
            self._run_one(replica, inputs, step, factor, state)
            for replica, inputs in enumerate(self._loop.inputs(slabs))
        ]
        return list(zip(*each, strict=True))

    def _run_one(
        self,
        replica: int,
        inputs: Sequence[torch.Tensor],
        step: int,
        factor: torch.Tensor,
        state: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        model = self._model
        if model.trace.is_random:
            model.streams.seed(model.first_replica + replica, step)
        buffers = [stack[replica] for stack in self._stacks]
        if model.gradients is None:
            return self._graph(*state, *buffers, *inputs, factor, self._arrived)
        model.gradients.enter(replica)
        outputs = self._graph(*state, *buffers, *inputs, factor, self._arrived)
        model.gradients.leave(replica)
        return outputs

    def _arrived(self, index: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of one parameter, while the graph goes on."""
        parameter = self._trained[index]
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif self._copied[index]:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            parameter.grad = gradient
        assert self._model.gradients is not None
        self._model.gradients.arrived(index)


def _not_alone(results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> list[bool]:
    """Return which results cannot be a gradient as they are.

    What changes a gradient in place would change what it shares its memory with: another gradient,
    an output, an argument. And torch's fused updates take it that it is contiguous.
    """
    memory = [_memory(tensor) for tensor in (*results, *arguments)]
    uses = Counter(memory)
    return [
        uses[place] > 1 or (result is not None and not result.is_contiguous())
        for place, result in zip(memory, results, strict=False)
    ]


def _memory(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage().data_ptr()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Capture no LSTM of oneDNN: its backward needs what it keeps only while torch records."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
