"""The class CopyingReplicas, a replica back end for a device with its own memory, such as a GPU.

The tensors of the emulated device (an IPU) stay in the memory of the CPU. ``CopyingReplicas`` keeps
copies of the weights on the other device, where forward and backward passes run.
``CopyingReplicas`` copies outputs, gradients and changed buffers back to the CPU. Therefore only
the module ``copying_replicas`` depends on the device with its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from popdist_py.poptorch.calls.nested_values import Call, map_tensors
from popdist_py.poptorch.execution.replicas import DeviceModel, Outputs
from popdist_py.poptorch.weights.parameter_gradients import add_gradient, clear_gradients

__all__ = ["CopyingReplicas"]

# A function that returns a copy of a tensor in the memory of another device.
Copy = Callable[[torch.Tensor], torch.Tensor]


class CopyingReplicas:
    """The replica back end that runs one replica after the other on another device.

    Args:
        model: The compiled model whose replicas run.
        to_device: A function that copies a tensor from the CPU to the other device.
        from_device: A function that copies a tensor from the other device to new memory of the CPU.
        context: A function that returns the context manager for forward and backward passes. For
            example, the context ``torch.device("cuda")`` makes ``torch.zeros()`` allocate memory on
            a GPU.
    """

    needs_context = True

    def __init__(
        self,
        model: DeviceModel,
        to_device: Copy,
        from_device: Copy,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._to_device = to_device
        self._from_device = from_device
        self._context = context
        state, first = model.state, model.first_forward
        self._places = state.stacked_buffers()
        stacks = list({id(stack): stack for _, _, stack in self._places}.values())
        self._kept = [
            *state.parameters.values(),
            *state.buffers.values(),
            *state.attributes.tensors(),
        ]
        self._kept += stacks
        self._changed = stacks or [state.buffers[name] for name in sorted(first.modified_buffers)]
        # The dictionary ``_copies`` contains the copies on the other device, and ``_versions``
        # contains the version counters of the copied tensors. The keys of ``_copies`` and
        # ``_versions`` are the ``id`` of each copied tensor.
        self._copies: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def run(self, call: Call, inputs: Sequence[torch.Tensor], number: int, scale: float) -> Outputs:
        """Run the replicas of this instance one after the other, in the order of their indices."""
        model = self._model
        self._copy_newer()
        copies = [self._to_device(tensor) for tensor in inputs]
        if model.state.has_own_tensors:
            # At the end of the following ``with`` block, ``substituted`` puts the tensors of the
            # first replica into the modules again.
            model.state.select(0, model.first_replica)
        with model.state.substituted(self._copies), self._context(), self._random():
            results = [
                self._run_one(replica, call, tensors, number, scale)
                for replica, tensors in enumerate(model.batching.inputs_of_replicas(copies))
            ]
        self._add_gradients()
        self._store_changes(inputs, copies)
        return list(zip(*results, strict=True))

    def _copy_newer(self) -> None:
        """Copy the parameters and buffers that changed since the last copy to the other device."""
        for tensor in self._kept:
            key = id(tensor)
            if self._versions.get(key) != tensor._version:
                copy = self._to_device(tensor.detach())
                self._copies[key] = copy.requires_grad_(tensor.requires_grad)
                self._versions[key] = tensor._version
        # If a forward pass changes a buffer, the version counter of the buffer is stored at the end
        # of the replicas' run. If the run fails, the next run copies the changed buffers to the
        # other device again.
        for buffer in self._changed:
            del self._versions[id(buffer)]
        clear_gradients(self._copies[id(parameter)] for parameter in self._model.trained)

    def _random(self) -> AbstractContextManager[Any]:
        if not self._model.first_forward.is_random:
            return nullcontext()
        return _RandomOnCpu(self._to_device, self._from_device)

    def _run_one(
        self, replica: int, call: Call, tensors: Sequence[torch.Tensor], number: int, scale: float
    ) -> list[torch.Tensor]:
        model = self._model
        if model.first_forward.is_random:
            model.streams.seed(model.first_replica + replica, number)
        for place, key, stack in self._places:
            place[key] = self._copies[id(stack)][replica]
        leaves, loss = model.run(call, [tensor.detach() for tensor in tensors])
        if loss is not None and model.gradients is not None:
            model.backward(loss, scale)
        return [self._from_device(leaf.detach()) for leaf in leaves]

    def _add_gradients(self) -> None:
        """Add the gradients of all replicas to the ``grad`` of the parameters on the CPU."""
        gradients = self._model.gradients
        if gradients is None:
            return
        # Gradients are added from the last parameter to the first, because the sum over all
        # instances starts with the gradients of the last parameters.
        for index, parameter in reversed(list(enumerate(self._model.trained))):
            gradient = self._copies[id(parameter)].grad
            if gradient is None:
                continue
            # Torch's fused updates require contiguous gradients.
            add_gradient(parameter, self._from_device(gradient).contiguous(), copies=False)
            gradients.on_grad_ready(index)
        gradients.collect()

    @torch.no_grad()
    def _store_changes(
        self, inputs: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
    ) -> None:
        """Copy values of changed buffers and inputs from the other device to the CPU's tensors."""
        for buffer in self._changed:
            buffer.copy_(self._from_device(self._copies[id(buffer)]))
            self._versions[id(buffer)] = buffer._version
        for index in self._model.first_forward.changed_inputs:
            inputs[index].copy_(self._from_device(copies[index]))


class _RandomOnCpu(TorchDispatchMode):
    """A dispatch mode that draws random numbers on the CPU, and copies them to the other device.

    Random numbers drawn on a GPU would differ from the random numbers that ``LoopReplicas`` (the
    back end that defines the correct results) draws on the CPU.
    """

    def __init__(self, to_device: Copy, from_device: Copy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._to_device = to_device
        self._from_device = from_device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        own_args, own_kwargs = map_tensors(self._from_device, (args, kwargs))
        if "device" in kwargs:
            own_kwargs["device"] = torch.device("cpu")
        results = map_tensors(self._to_device, func(*own_args, **own_kwargs))
        if func._schema.name.endswith("_"):
            return args[0].copy_(results)
        return results
