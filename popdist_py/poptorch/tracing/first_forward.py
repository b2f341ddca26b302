"""The function ``first_forward``, which runs a model once to collect data for the compilation.

After the run of the model, ``first_forward`` restores the buffers on the device and the random
state of the host.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from popdist_py.poptorch.calls.nested_values import Call, Tree, check_outputs, flatten
from popdist_py.poptorch.tracing.block_places import ForwardPlaces, Strategy
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch, WatchPart
from popdist_py.poptorch.tracing.losses import Losses
from popdist_py.poptorch.tracing.overlapped_io import OverlapConditions, OverlapMarks
from popdist_py.poptorch.tracing.recorded_operations import Observer
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["FirstForward", "WatchedForward", "WatchedModel", "first_forward"]

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstForward:
    """The properties of a model that were found in the forward pass of one micro-batch.

    Attributes:
        placement: The IPUs and pipeline stages of the model's operations.
        outputs: The structure (nested tuples, lists and dictionaries) of the value that the forward
            method returned.
        shared: For each output tensor, whether the tensor shares memory with an input, a parameter,
            a buffer or a constant.
        loss_output: The index of the output tensor that is the loss; None if the forward method
            does not return the loss.
        loss_has_gradient: Whether the loss depends on a parameter.
        used_parameters: The names of the parameters that get a gradient.
        modified_buffers: The names of the buffers that the forward pass changed.
        modified_parameters: The names of the parameters that the forward pass itself changed,
            without an optimizer.
        changed_inputs: The indices of the inputs that the forward pass changed in place.
        is_random: Whether the forward pass drew random numbers.
        needs_python: Whether Python code of the forward method has to run with every micro-batch.
    """

    placement: ForwardPlaces
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedForward:
    """The result of a forward pass, and the ``ForwardWatch`` that recorded the pass.

    Attributes:
        result: The value that the forward method returned.
        loss: The loss of a training model; None for inference.
        watch: The ``ForwardWatch`` with the records of the forward pass.
        placement: The IPUs and pipeline stages of the model's operations.
    """

    result: Any
    loss: torch.Tensor | None
    watch: ForwardWatch
    placement: ForwardPlaces


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedModel:
    """A model, the arguments of its call, and the options that affect its forward pass.

    Attributes:
        model: The module whose forward method runs.
        call: The arguments of a whole call of the model, which contain all micro-batches.
        training: Whether a backward pass follows the forward pass.
        strategy: The execution strategy, which assigns operations to IPUs.
        overlap: The options that decide whether overlapped input and output is allowed.
        module_scopes: Whether the names of operations begin with the names of their modules.
    """

    model: nn.Module
    call: Call
    training: bool
    strategy: Strategy
    overlap: OverlapConditions
    module_scopes: bool

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        context: Context,
        *,
        observes: bool,
        results: WatchPart | None = None,
    ) -> WatchedForward:
        """Run the forward pass of one micro-batch, and record its losses and operations.

        Args:
            inputs: The input tensors of one micro-batch, which replace the tensors of the whole
                call.
            context: A function that returns a context manager, inside which the forward pass runs.
            observes: Whether to record the operations inside torch's functions.
            results: A recorder of the results of torch's functions.

        Raises:
            Error: A training model does not have a loss or has several independent losses, or the
                model breaks a rule of blocks, operators or overlapped input and output.
            AssertionError: The execution strategy does not contain one of the model's blocks, or
                cannot choose an IPU for the block.
        """
        with context():
            leaves = [tensor.detach() for tensor in inputs]
            losses = Losses() if self.training else None
            blocks = BlockRecorder(
                self.strategy, self.model, leaves, module_scopes=self.module_scopes
            )
            watch = ForwardWatch(
                losses=losses,
                blocks=blocks,
                overlap=OverlapMarks(self.model, self.overlap, leaves),
                results=results,
                observer=Observer(blocks, losses) if observes else None,
            )
            if watch.observer is not None:
                watch.observer.begin(self.model, _names(self.model, self.call), leaves)
            with watch.following():
                args, kwargs = self.call.arguments(leaves)
                result = self.model(*args, **kwargs)
                if watch.observer is not None:
                    watch.observer.finish(result)
        return WatchedForward(
            result=result,
            loss=losses.final() if losses is not None else None,
            watch=watch,
            placement=blocks.placement(training=self.training),
        )


def first_forward(
    model: WatchedModel,
    inputs: Sequence[torch.Tensor],
    state: DeviceState,
    context: Context,
    *,
    observes: bool,
) -> tuple[FirstForward, Observer | None]:
    """Run the forward pass of one micro-batch, and return the properties of the model.

    Args:
        model: The ``WatchedModel``: a model, the arguments of a call, and the options.
        inputs: The input tensors of the micro-batch.
        state: The model's parameters, buffers and constants on the device.
        context: A function that returns a context manager, inside which the forward pass runs.
        observes: Whether to record the operations inside torch's functions, and to return the
            ``Observer``.

    Raises:
        Error: The type of an output is unsupported, or ``WatchedModel.run`` raised an Error.
        AssertionError: ``WatchedModel.run`` raised an AssertionError.
    """
    before = _StateBefore(state)
    copies = [tensor.clone() for tensor in inputs]
    attributes = state.attributes.snapshot()
    try:
        results = _ResultMemory()
        seen = model.run(copies, context, observes=observes, results=results)
        is_random = before.random_numbers_drawn()
        state.check_registered()
        modified, changed_weights = before.modified_buffers(), before.modified_parameters()
        leaves: list[torch.Tensor] = []
        outputs = flatten(seen.result, leaves)
        check_outputs(outputs)
        loss = seen.loss
        has_gradient = loss is not None and loss.requires_grad
        used = _leading_to(loss, state) if loss is not None and has_gradient else frozenset()
    finally:
        before.restore()
        state.attributes.record_changes(attributes)
        state.attributes.restore()
    own_places = {_place(tensor) for tensor in _state_tensors(state, copies)}
    found = FirstForward(
        placement=seen.placement,
        outputs=outputs,
        shared=tuple(_place(leaf) in own_places for leaf in leaves),
        loss_output=next((i for i, leaf in enumerate(leaves) if leaf is loss), None),
        loss_has_gradient=has_gradient,
        used_parameters=used,
        modified_buffers=modified,
        modified_parameters=changed_weights,
        changed_inputs=tuple(index for index, copy in enumerate(copies) if copy._version != 0),
        is_random=is_random,
        needs_python=seen.watch.needs_python or bool(changed_weights),
    )
    observer = seen.watch.observer
    foreign = [
        weakref.ref(leaf) for leaf in leaves if _place(leaf) not in own_places | results.storages
    ]
    # Some of torch's function transforms hide the memory of their results. A result with hidden
    # memory seems to be made outside of the forward pass, and only the variable ``leaves`` refers
    # to the result. The ``del`` statement frees a result whose memory is hidden.
    del seen, loss, leaves
    if any(leaf() is not None for leaf in foreign):
        warnings.warn(_FOREIGN_OUTPUT, stacklevel=2)
    return found, observer


class _StateBefore:
    """The buffers, parameters and random state before a forward pass, to detect changes."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._random = torch.get_rng_state()
        self._buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
        self._weights = {name: p.detach().clone() for name, p in state.parameters.items()}
        self._versions = _versions(state.buffers) | _versions(state.parameters)

    def random_numbers_drawn(self) -> bool:
        """Tell whether the forward pass drew numbers from the host's random number generator."""
        return not torch.equal(self._random, torch.get_rng_state())

    def modified_buffers(self) -> frozenset[str]:
        """Return the names of the buffers that the forward pass changed."""
        # The elements of buffers are compared too, because batch norms change their statistics
        # without increasing the buffer's version counter.
        return self._modified(self._state.buffers, self._buffers)

    def modified_parameters(self) -> frozenset[str]:
        """Return the names of the parameters that the forward pass changed."""
        # The elements of parameters are compared too, because an assignment to ``.data`` does not
        # increase a parameter's version counter.
        return self._modified(self._state.parameters, self._weights)

    def _modified(
        self, tensors: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
    ) -> frozenset[str]:
        return frozenset(
            name
            for name, tensor in tensors.items()
            if tensor._version != self._versions[name] or not torch.equal(tensor, before[name])
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers and the state of the host's random number generator."""
        torch.set_rng_state(self._random)
        for name, value in self._buffers.items():
            self._state.buffers[name].copy_(value)


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor._version for name, tensor in tensors.items()}


_FOREIGN_OUTPUT: Final = (
    "Output expected to be on the IPU but is on cpu: the model's forward returns a tensor that "
    "was made outside the forward"
)


class _ResultMemory:
    """A recorder of the memory addresses of the tensors that torch's functions return.

    Attributes:
        storages: The memory addresses of the returned tensors' storages.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Do nothing: the method ``after`` records the results of torch's functions."""

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the memory address of each tensor that a torch function returned."""
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                # Sparse and batched tensors do not give access to a storage.
                with suppress(RuntimeError):
                    self.storages.add(_place(item))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state_tensors(state: DeviceState, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        *inputs,
        *state.parameters.values(),
        *state.buffers.values(),
        *state.attributes.tensors(),
    ]


def _leading_to(loss: torch.Tensor, state: DeviceState) -> frozenset[str]:
    """Return the names of the parameters that the loss depends on, from autograd's graph."""
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
            # A custom autograd function may return None as a gradient, so only a backward pass
            # shows which parameters get a gradient.
            return _with_gradient(loss, state)
        if hasattr(node, "variable") and id(node.variable) in trainable:
            used.add(trainable[id(node.variable)])
        waiting += [before for before, _ in node.next_functions if before is not None]
    return frozenset(used)


def _with_gradient(loss: torch.Tensor, state: DeviceState) -> frozenset[str]:
    """Run the backward pass, and return the names of the parameters with a gradient."""
    trainable = {name: p for name, p in state.parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss.sum(), list(trainable.values()), allow_unused=True)
    return frozenset(
        name for name, gradient in zip(trainable, gradients, strict=True) if gradient is not None
    )


def _names(model: nn.Module, call: Call) -> list[str]:
    """Return a name for each input tensor, derived from the argument names of ``forward``."""
    parameters: list[inspect.Parameter] = []
    with suppress(ValueError, TypeError):
        parameters = list(inspect.signature(model.forward).parameters.values())
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    trees: list[tuple[str, Tree]] = [
        (plain[index] if index < len(plain) else f"input{index}", tree)
        for index, tree in enumerate(call.positional)
    ]
    names: list[str] = []
    for name, tree in [*trees, *call.keywords]:
        count = tree.num_tensors
        names += [name] if count == 1 else [f"{name}.{index}" for index in range(count)]
    return names
