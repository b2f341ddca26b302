"""The first forward: runs the model once and finds out what the later runs need to know.

Leaves the device's state as it found it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch import forward_phase
from popdist_py.poptorch.calls.nested_values import Tree, check_outputs, flatten
from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.execution.losses import LossRecorder
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["Trace", "run_once", "trace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one forward of one micro-batch showed.

    Attributes:
        outputs: shape of what forward returns.
        shared: for each output tensor, whether it shares memory with an input or with state.
        loss_output: index of the output tensor that is the loss; None if it is not returned.
        loss_has_gradient: whether any parameter leads to the loss.
        used_parameters: names of the parameters that got a gradient.
        modified_buffers: names of the buffers that changed.
        modified_parameters: names of the parameters that the forward itself changed.
        changed_inputs: indices of the inputs that the forward changed in place.
        is_random: whether random numbers were drawn.
        needs_python: whether Python code has to run with every micro-batch.
    """

    outputs: Tree
    shared: tuple[bool, ...]
    loss_output: int | None
    loss_has_gradient: bool
    used_parameters: frozenset[str]
    modified_buffers: frozenset[str]
    modified_parameters: frozenset[str]
    changed_inputs: tuple[int, ...]
    is_random: bool
    needs_python: bool


def trace(
    forward: Callable[[Sequence[torch.Tensor]], Any],
    inputs: Sequence[torch.Tensor],
    state: DeviceState,
    *,
    training: bool,
    around: Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]] = nullcontext,
) -> Trace:
    """Run ``forward`` on one micro-batch, inside the context that ``around`` makes, and report.

    ``around`` is told the tensors that the forward gets.

    Raises:
        Error: a training model without loss, or with several independent ones; an unsupported type
            of output.
    """
    saved = {name: buffer.clone() for name, buffer in state.buffers.items()}
    versions = {name: buffer._version for name, buffer in state.buffers.items()}
    random_before = torch.get_rng_state()
    copies = [tensor.clone() for tensor in inputs]
    attributes = state.snapshot()
    weights = {name: parameter.detach().clone() for name, parameter in state.parameters.items()}
    weight_versions = {name: parameter._version for name, parameter in state.parameters.items()}
    forward_phase.take_python_required()
    made = _Made()
    try:
        with made:
            result, loss = run_once(forward, copies, state, training=training, around=around)
        is_random = not torch.equal(random_before, torch.get_rng_state())
        state.check_registered()
        modified = frozenset(
            name
            for name, buffer in state.buffers.items()
            # Batch norms change their statistics without telling the version counter.
            if buffer._version != versions[name] or not torch.equal(buffer, saved[name])
        )
        # Through ``.data`` a weight changes without telling its version counter.
        changed_weights = frozenset(
            name
            for name, parameter in state.parameters.items()
            if parameter._version != weight_versions[name]
            or not torch.equal(parameter, weights[name])
        )
        leaves: list[torch.Tensor] = []
        outputs = flatten(result, leaves)
        check_outputs(outputs)
        used: frozenset[str] = frozenset()
        if has_gradient := loss is not None and loss.requires_grad:
            used = _leading_to(loss, state)
    finally:
        torch.set_rng_state(random_before)
        _restore(state, saved)
        state.freeze_constants(attributes)
        state.restore_constants()
    own_places = {_place(tensor) for tensor in _state_tensors(state, copies)}
    trace_of_forward = Trace(
        outputs=outputs,
        shared=tuple(_place(leaf) in own_places for leaf in leaves),
        loss_output=next((i for i, leaf in enumerate(leaves) if leaf is loss), None),
        loss_has_gradient=has_gradient,
        used_parameters=used,
        modified_buffers=modified,
        modified_parameters=changed_weights,
        changed_inputs=tuple(index for index, copy in enumerate(copies) if copy._version != 0),
        is_random=is_random,
        needs_python=forward_phase.take_python_required() or bool(changed_weights),
    )
    foreign = [
        weakref.ref(leaf) for leaf in leaves if _place(leaf) not in own_places | made.storages
    ]
    # Some of torch's transformations hide where their results lie, but nobody else holds these.
    del result, loss, leaves
    if any(leaf() is not None for leaf in foreign):
        warnings.warn(_FOREIGN_OUTPUT, stacklevel=2)
    return trace_of_forward


_FOREIGN_OUTPUT: Final = (
    "Output expected to be on the IPU but is on cpu: forward returns a tensor made outside of it"
)


_HOOKING: Final = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)


class _Made(TorchFunctionMode):
    """Notes where the results of torch's functions lie.

    Attributes:
        storages: their addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function and note its results.

        Hooks on gradients are noted, too, because they run Python code in each backward pass.
        """
        if func in _HOOKING:
            forward_phase.require_python()
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                with suppress(RuntimeError):  # sparse and batched tensors have no storage to show
                    self.storages.add(_place(item))
        return result


def run_once(
    forward: Callable[[Sequence[torch.Tensor]], Any],
    inputs: Sequence[torch.Tensor],
    state: DeviceState,
    *,
    training: bool,
    around: Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]],
) -> tuple[Any, torch.Tensor | None]:
    """Run the forward as the one that compiles; return its result, and a training model's loss.

    Raises:
        Error: a training model without loss, or with several independent ones.
    """
    recorder = LossRecorder()
    # trace() itself restores the host's random stream.
    context = DeviceContext(state=state, training=training, is_random=False)
    with context.enter(tracing=True) as stack:
        if training:
            stack.enter_context(recorder)
        leaves = [tensor.detach() for tensor in inputs]
        stack.enter_context(around(leaves))
        result = forward(leaves)
    return result, recorder.final() if training else None


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state_tensors(state: DeviceState, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*inputs, *state.parameters.values(), *state.buffers.values(), *state.constants()]


@torch.no_grad()
def _restore(state: DeviceState, saved: dict[str, torch.Tensor]) -> None:
    for name, value in saved.items():
        state.buffers[name].copy_(value)


def _leading_to(loss: torch.Tensor, state: DeviceState) -> frozenset[str]:
    """Return which parameters the loss depends on."""
    trainable = {id(p): name for name, p in state.parameters.items() if p.requires_grad}
    used: set[str] = set()
    seen = set()
    waiting: list[Any] = [torch.autograd.graph.get_gradient_edge(loss).node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return _with_gradient(loss, state)  # the user's function may give some no gradient
        if hasattr(node, "variable") and id(node.variable) in trainable:
            used.add(trainable[id(node.variable)])
        waiting += [before for before, _ in node.next_functions if before is not None]
    return frozenset(used)


def _with_gradient(loss: torch.Tensor, state: DeviceState) -> frozenset[str]:
    """Run the backward and return which parameters got a gradient."""
    trainable = {name: p for name, p in state.parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss.sum(), list(trainable.values()), allow_unused=True)
    return frozenset(
        name for name, gradient in zip(trainable, gradients, strict=True) if gradient is not None
    )
