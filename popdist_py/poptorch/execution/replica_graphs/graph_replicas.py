"""The class GraphReplicas, a replica back end that runs a recorded graph of torch's operations.

The recorded graph contains the operations of one forward pass and its backward pass. The Python
code of the model's forward pass runs only when the graph is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.batch_folding import folded_batches
from popdist_py.poptorch.execution.replica_graphs.graph_code import function_of
from popdist_py.poptorch.execution.replica_graphs.recording import (
    RecordedGraph,
    ZerosRefused,
    record,
)
from popdist_py.poptorch.execution.replicas import DeviceModel, Outputs
from popdist_py.poptorch.weights.parameter_gradients import add_gradient

__all__ = ["GraphReplicas"]


class GraphReplicas:
    """The replica back end that runs a recorded graph of torch's operations.

    Args:
        model: The compiled model whose replicas run.
        call: The arguments of a model's call, for recording the graph.
        inputs: One tensor for each input of the model, for recording the graph. Each input tensor
            contains a micro-batch for each group of replicas that get the same inputs.
        vectorised: Whether one run of the graph computes all local replicas. With False, the
            recorded graph runs once for each local replica.

    Raises:
        RuntimeError: The forward or the backward pass of the model cannot be recorded.
    """

    # A recorded graph runs without a DeviceContext, because the graph calls neither the user's
    # modules nor functions that a torch function mode intercepts.
    needs_context = False

    def __init__(
        self, model: DeviceModel, call: Call, inputs: Sequence[torch.Tensor], *, vectorised: bool
    ) -> None:
        self._model = model
        self._vectorised = vectorised
        self._trained = list(model.trained)
        own = model.state.stacked_buffers() if model.batching.replicas > 1 else []
        self._stacks = list({id(stack): stack for _, _, stack in own}.values())
        stacked = {id(place[key]) for place, key, _ in own}
        state = [*model.state.parameters.values(), *model.state.buffers.values()]
        trained = {id(parameter) for parameter in self._trained}
        self._fixed = [t for t in state if id(t) not in trained and id(t) not in stacked]
        self._own = own
        self._state = [*self._trained, *self._fixed]
        self._scale, self._factor = 1.0, torch.ones((), dtype=torch.float64)
        self._num_outputs = 0
        # For each gradient, the list ``_copied`` tells whether the gradient is copied before it
        # becomes a parameter's ``grad``. The list ``_copied`` is computed after the first run of
        # the graph.
        self._copied: list[bool] | None = None
        self._graph = self._function(call, inputs)

    # -- methods that record the graph --------------------------------------------------------

    def _function(self, call: Call, inputs: Sequence[torch.Tensor]) -> Callable[..., list[Any]]:
        try:
            recorded = self._recorded(call, inputs, is_real=False)
        except ZerosRefused:
            recorded = self._recorded(call, inputs, is_real=True)
        return function_of(recorded, self._num_outputs)

    def _recorded(
        self, call: Call, inputs: Sequence[torch.Tensor], *, is_real: bool
    ) -> RecordedGraph:
        """Record the forward and backward pass of a model on copies of the model's tensors.

        The model's own tensors do not change while the graph is recorded.

        Args:
            call: The arguments of a call.
            inputs: One tensor for each input of the model. The tensor contains a micro-batch for
                each group of replicas that get the same inputs.
            is_real: Whether the results of large matrix products and convolutions are computed
                while recording. With False, zeros replace the results of large matrix products and
                convolutions.
        """
        batching = self._model.batching
        if self._vectorised:
            buffers: Sequence[torch.Tensor] = self._stacks
            own_inputs = [batching.stacked(tensor) for tensor in inputs]
        else:
            buffers = [stack[0] for stack in self._stacks]
            own_inputs = batching.inputs_of_replicas(inputs)[0]
        # Parameters are not cloned, because a forward pass that changes parameters is not recorded.
        weights = {id(parameter) for parameter in self._model.state.parameters.values()}
        examples = [
            tensor.detach() if id(tensor) in weights else tensor.detach().clone()
            for tensor in (*self._state, *buffers, *own_inputs)
        ]
        examples.append(torch.ones_like(self._factor))
        with (
            self._model.state.attributes.contents_kept(),
            torch.enable_grad(),
            _without_other_libraries(),
        ):
            return record(partial(self._joint, call), examples, is_real=is_real)

    def _joint(self, call: Call, *flat: torch.Tensor) -> list[Any]:
        """Run the forward and the backward pass; return the outputs and the gradients.

        Args:
            call: The arguments of a call.
            *flat: The trained parameters, the other parameters and buffers, the buffers of which
                each replica has its own copy, the inputs, and the factor that multiplies the
                gradients.
        """
        sizes = (len(self._trained), len(self._fixed), len(self._stacks))
        ends = [sum(sizes[: n + 1]) for n in range(3)]
        trained, fixed = flat[: ends[0]], flat[ends[0] : ends[1]]
        buffers, inputs, scale = flat[ends[1] : ends[2]], flat[ends[2] : -1], flat[-1]
        weights = [tensor.detach().requires_grad_(self._model.training) for tensor in trained]
        shown = dict(zip(map(id, self._trained), weights, strict=True))
        shown.update(zip(map(id, self._fixed), fixed, strict=True))
        with self._model.state.substituted(shown):
            if self._vectorised:
                run = torch.func.vmap(partial(self._one, call))
                with folded_batches():
                    outputs, loss = run(list(buffers), list(inputs))
            else:
                outputs, loss = self._one(call, list(buffers), list(inputs))
        self._num_outputs = len(outputs)
        results = [output.detach() for output in outputs]
        if not self._model.training:
            return results
        gradients = torch.autograd.grad(
            loss, weights, scale.to(loss.dtype).expand_as(loss), allow_unused=True
        )
        return [*results, *gradients]

    def _one(
        self, call: Call, buffers: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run one replica's forward pass; inside ``vmap``, run the forward pass of all replicas."""
        by_stack = dict(zip(map(id, self._stacks), buffers, strict=True))
        for place, key, stack in self._own:
            place[key] = by_stack[id(stack)]
        leaves, loss = self._model.run(call, inputs)
        results = [
            leaf.clone() if shared else leaf
            for leaf, shared in zip(leaves, self._model.first_forward.shared, strict=True)
        ]
        return results, leaves[0] if loss is None else loss

    # -- methods that run the graph -----------------------------------------------------------

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run all local replicas with the recorded graph.

        Raises:
            Exception: The error that the model's forward pass raises for ``inputs``. If the forward
                pass does not raise an error, the error of the recorded graph is raised.
        """
        try:
            # Torch function modes are disabled, because the recorded operations already include the
            # effects of the modes.
            with torch._C.DisableTorchFunction():
                return self._run(inputs, number, scale)
        except Exception as error:
            failure = error
        # In norm groups (replicas with common batch norm statistics), the forward pass of one
        # replica would wait for the batch norms of other replicas. Therefore the forward pass is
        # not repeated to get its error.
        if self._model.norm_groups is None:
            self._model.run_as_written(call, inputs, number)
        raise failure

    @torch.no_grad()
    def _run(self, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        if scale != self._scale:
            self._scale, self._factor = scale, torch.tensor(scale, dtype=torch.float64)
        batching = self._model.batching
        if self._vectorised:
            stacked = [batching.stacked(tensor) for tensor in inputs]
            return self._run_graph(self._stacks, stacked)
        each = [
            self._run_one(replica, tensors, number)
            for replica, tensors in enumerate(batching.inputs_of_replicas(inputs))
        ]
        return list(zip(*each, strict=True))

    def _run_one(
        self, replica: int, tensors: Sequence[torch.Tensor], number: int
    ) -> list[torch.Tensor]:
        model = self._model
        if model.first_forward.is_random:
            model.streams.seed(model.first_replica + replica, number)
        buffers = [stack[replica] for stack in self._stacks]
        if model.gradients is None:
            return self._run_graph(buffers, tensors)
        model.gradients.select_replica(replica)
        outputs = self._run_graph(buffers, tensors)
        model.gradients.collect()
        return outputs

    def _run_graph(
        self, buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        arguments = (*self._state, *buffers, *tensors, self._factor)
        if self._copied is not None:
            return self._graph(*arguments, self._add_gradient)
        gradients: list[torch.Tensor | None] = [None] * len(self._trained)
        outputs = self._graph(*arguments, gradients.__setitem__)
        self._copied = _not_alone([*outputs, *gradients], arguments)[len(outputs) :]
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._add_gradient(index, gradient)
        return outputs

    def _add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the ``grad`` of a parameter; a running graph calls ``_add_gradient``.

        Args:
            index: The index of the gradient's parameter.
            gradient: The gradient that the graph has just computed.
        """
        assert self._copied is not None
        assert self._model.gradients is not None
        add_gradient(self._trained[index], gradient, copies=self._copied[index])
        self._model.gradients.on_grad_ready(index)


def _not_alone(results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> list[bool]:
    """Return whether to copy each result of a graph before it becomes a parameter's ``grad``.

    A result of the graph is copied if it shares memory with another result or with an argument of
    the graph. Without a copy, an in-place change of the gradient would change the other tensor that
    uses the same memory. A result of the graph is also copied if the result is not contiguous,
    because torch's fused optimisers require contiguous gradients.
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
def _without_other_libraries() -> Iterator[None]:
    """Disable oneDNN and NNPACK in the ``with`` block, in which a graph is recorded.

    A recorded graph cannot run oneDNN's LSTM. The backward pass of oneDNN's LSTM needs data that
    its forward pass stores only while autograd is enabled, and a recorded graph runs without
    autograd. Without oneDNN, torch would compute some convolutions with NNPACK. NNPACK never frees
    the working memory of its largest convolution, which was 61 MB in MobileNet V3 large with 8
    replicas.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
