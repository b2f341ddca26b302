"""The class SharedOptimizer, which updates weights in memory that the instances of a host share.

Without a SharedOptimizer, all instances would compute the same update of the same weights. With
shared weights, each instance sums the gradients of one slice of the weights, and updates the slice
in the shared memory. Because each instance needs the summed gradients of its own slice only, the
instances do not exchange summed gradients. The host stores weights and optimiser state only once.

Instances write to the shared memory only during an optimiser step, which all instances make
together. Weights and optimiser state that a program loads between optimiser steps remain in the
instance's own memory until the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from popdist_py.collectives import Communicator, HostMemory
from popdist_py.collectives.signature import Signature
from popdist_py.errors import PopdistError
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer, is_kept, kind_of
from popdist_py.poptorch.update.flat_buffers import FlatBuffers, element_counts
from popdist_py.poptorch.weights.parameter_gradients import set_gradients

__all__ = ["SharedOptimizer", "can_share"]

_UPDATED = Signature("update of the weights")


def can_share(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    communicator: Communicator,
) -> bool:
    """Tell whether the instances may use a SharedOptimizer.

    The instances must share memory, and the update of each weight must be independent of all other
    weights. The device parameters must be contiguous and of dtype float32 or float64.

    Args:
        optimizer: The user's optimiser.
        parameters: The device parameters that an optimiser step updates.
        communicator: The communicator that connects the instances.
    """
    return (
        communicator.host_memory is not None
        and kind_of(optimizer).is_elementwise
        and all(p.dtype in (torch.float32, torch.float64) for p in parameters)
        and all(p.is_contiguous() for p in parameters)
    )


@dataclass(frozen=True, slots=True)
class _Shard:
    """The elements of one parameter that this instance (a process of the job) updates.

    Attributes:
        parameter: The index of the parameter.
        name: The name of the parameter.
        part: The position of the updated elements in the flattened parameter, as a slice.
        weights: The tensor of the updated elements in the shared memory, which is changed by
            torch's optimiser.
    """

    parameter: int
    name: str
    part: slice
    weights: torch.Tensor


class SharedOptimizer(DeviceOptimizer):
    """An optimiser that updates one slice of the weights that all instances of a host share.

    The constructor moves the parameters into shared memory. All instances must call the constructor
    at the same time.

    Args:
        source: The user's optimiser.
        device_of: A function that returns the device parameters of a host parameter.
        names: The device parameters that an optimiser step updates, keyed by their names.
        parameters: The device parameters in ``names``, in the order of ``gradients``. The order of
            ``parameters`` must be equal on all instances.
        gradients: For each parameter, the tensor that contains this instance's gradient.
        communicator: The communicator that connects the instances. The communicator must have a
            ``host_memory``.
    """

    def __init__(
        self,
        source: torch.optim.Optimizer,
        device_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        names: Mapping[str, torch.Tensor],
        *,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        communicator: Communicator,
    ) -> None:
        memory = communicator.host_memory
        assert memory is not None
        self._communicator = communicator
        self._weights = _common(parameters, memory)
        self._addresses = [view.data_ptr() for view in self._weights.views]
        self._state = {
            key: _common(parameters, memory) for key in kind_of(source).state if key != "step"
        }
        name_of = {id(parameter): name for name, parameter in names.items()}
        self._shards = _shards(
            parameters, [name_of[id(p)] for p in parameters], self._weights, memory
        )
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        set_gradients(
            [shard.weights for shard in self._shards],
            [gradients[shard.parameter].view(-1)[shard.part] for shard in self._shards],
        )
        # The variable ``_done`` is the number of optimiser steps that have been made. For each
        # parameter, ``_ahead`` contains the difference between a loaded step count and ``_done``.
        self._done = 0
        self._ahead: dict[str, float] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._has_loaded = False
        super().__init__(source, device_of, names)
        self._group_of = [n for n, group in enumerate(self._groups) for _ in group]
        with torch.no_grad():
            self._begin_state()
            self._take_weights()
            communicator.agree(_UPDATED)
            self._show_weights()

    def _updated(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        index = self._index[id(parameter)]
        return [shard.weights for shard in self._shards if shard.parameter == index]

    @property
    def updates_each_alone(self) -> bool:
        """Always False, because all gradients of a weight slice are reduced at the same time."""
        return False

    def sync(self, source: torch.optim.Optimizer) -> None:
        """Copy the present settings of the user's optimiser to the device's optimiser."""
        super().sync(source)
        self._state_is_shared = False

    @torch.no_grad()
    def step(self, loss_scale: float) -> None:
        """Update this instance's slice of the weights, and wait for the other instances.

        Args:
            loss_scale: The factor that multiplied the loss in the backward passes. The weight
                update divides the gradients by ``loss_scale``.
        """
        self._take_weights()
        self._take_loaded()
        self._update(loss_scale)
        self._share_state()
        self._done += 1
        try:
            self._communicator.agree(_UPDATED)
        except PopdistError:
            # An instance was lost, and the lost instance may not have updated its slice of the
            # weights.
            self._is_half_done = True
            raise
        self._show_weights()

    def _update(self, loss_scale: float) -> None:
        # An instance whose slice is empty still takes part in the reduction of the gradients' norm.
        if self._shards:
            super()._update(loss_scale)
        elif self.max_grad_norm != float("inf"):
            self._clip([])

    def _clip(self, updated: Sequence[torch.Tensor]) -> None:
        gradients = [p.grad for p in updated if p.grad is not None]
        squares = (
            sum(float(norm) ** 2 for norm in torch._foreach_norm(gradients)) if gradients else 0.0
        )
        total = np.array([squares])
        self._communicator.all_reduce(total, name="squared norm of the gradients")
        # The factor on the gradients is the same as in torch.nn.utils.clip_grad_norm_.
        factor = min(1.0, self.max_grad_norm / (float(total[0]) ** 0.5 + 1e-6))
        if gradients:
            torch._foreach_mul_(gradients, factor)

    # -- methods for the weights in the shared memory -----------------------------------------

    def _take_weights(self) -> None:
        """Copy this instance's slice of loaded weights into the shared memory."""
        for shard in self._shards:
            parameter = self.parameters[shard.parameter]
            if parameter.data_ptr() != self._addresses[shard.parameter]:
                shard.weights.copy_(parameter.detach().view(-1)[shard.part])

    def _show_weights(self) -> None:
        """Make all parameters use the shared memory again."""
        places = zip(self.parameters, self._addresses, self._weights.views, strict=True)
        for parameter, address, view in places:
            if parameter.data_ptr() != address:
                parameter.data = view

    # -- methods for the optimiser state in the shared memory ---------------------------------

    def _begin_state(self) -> None:
        """Fill this instance's slice of the optimiser state with its initial values."""
        for key, rooms in self._state.items():
            first = self._first_value(key)
            # If the initial value of a state tensor is zero, nothing is written, because new shared
            # memory contains zeros.
            for shard in self._shards if first else ():
                rooms.views[shard.parameter].view(-1)[shard.part].fill_(first)

    def _share_state(self) -> None:
        """Move state tensors that torch has allocated into the shared memory."""
        if self._state_is_shared:
            return
        for shard in self._shards:
            state = self._optimizer.state[shard.weights]
            for key, rooms in self._state.items():
                value = state.get(key)
                if value is not None:
                    room = rooms.views[shard.parameter].view(-1)[shard.part]
                    if value.data_ptr() != room.data_ptr():
                        room.copy_(value)
                    state[key] = room
        self._state_is_shared = True

    def state_tensors(self, *, copied: bool = True) -> dict[str, torch.Tensor]:
        """Return copies of the optimiser's state tensors, keyed by their names on the device.

        Before the first optimiser step, the state tensors contain the initial values, usually
        zeros.

        Args:
            copied: Whether the tensors are copies. With False, the tensors may be the shared
                memory, which the next optimiser step changes.

        Raises:
            Error: An instance was lost during a weight update.
        """
        self.check_whole()
        state = {}
        for parameters, group in zip(self._groups, self._present, strict=True):
            for parameter in parameters:
                name = self._names[id(parameter)]
                for key, prefix in self._kind.state.items():
                    if is_kept(key, group):
                        value = self._state_of(parameter, key, name, prefix)
                        state[f"{prefix}___{name}"] = value.clone() if copied else value
        return state

    def _state_of(self, parameter: torch.Tensor, key: str, name: str, prefix: str) -> torch.Tensor:
        if key == "step":
            return torch.tensor(self._ahead.get(name, 0.0) + self._done)
        loaded = self._loaded.get(f"{prefix}___{name}")
        return self._state[key].views[self._index[id(parameter)]] if loaded is None else loaded

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the state tensors in ``tensors``, and do not change other state tensors."""
        for parameter in self.parameters:
            name = self._names[id(parameter)]
            for key, prefix in self._kind.state.items():
                value = tensors.get(f"{prefix}___{name}")
                if value is None:
                    continue
                if key == "step":
                    self._ahead[name] = float(value) - self._done
                else:
                    self._loaded[f"{prefix}___{name}"] = (
                        value.detach().to(parameter.dtype, copy=True).reshape(parameter.shape)
                    )
        self._has_loaded = True

    def _take_loaded(self) -> None:
        """Copy this instance's slice of loaded optimiser state into the shared memory."""
        if not self._has_loaded:
            return
        for shard in self._shards:
            group = self._present[self._group_of[shard.parameter]]
            state = self._optimizer.state[shard.weights]
            # All of torch's optimisers except SGD expect a step count in the state.
            state.setdefault("step", torch.zeros(()))
            for key, prefix in self._kind.state.items():
                if not is_kept(key, group):
                    continue
                if key == "step":
                    state[key] = torch.tensor(self._ahead.get(shard.name, 0.0) + self._done)
                    continue
                room = self._state[key].views[shard.parameter].view(-1)[shard.part]
                value = self._loaded.get(f"{prefix}___{shard.name}")
                if value is not None:
                    room.copy_(value.view(-1)[shard.part])
                state[key] = room
        self._loaded = {}
        self._has_loaded = False


def _common(tensors: Sequence[torch.Tensor], memory: HostMemory) -> FlatBuffers:
    """Return flat buffers for the tensors, in memory that all instances of the host share.

    All instances must call the function ``_common`` together.
    """
    buffers = {
        dtype: torch.from_numpy(memory.common_buffer(count * dtype.itemsize)).view(dtype)
        for dtype, count in element_counts(tensors).items()
    }
    return FlatBuffers(tensors, buffers)


def _shards(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    weights: FlatBuffers,
    memory: HostMemory,
) -> list[_Shard]:
    """Return the part of each parameter that is in this instance's slice of the flat buffers.

    Parameters outside this instance's slice are left out.

    Args:
        parameters: The parameters, in the order of the flat buffers.
        names: The names of the parameters.
        weights: The flat buffers of the weights in the shared memory.
        memory: The shared memory of the host, which divides each buffer among the instances.
    """
    slices = {dtype: memory.own_slice(flat.numel()) for dtype, flat in weights.buffers.items()}
    shards = []
    for index, (parameter, view) in enumerate(zip(parameters, weights.views, strict=True)):
        own, first = slices[parameter.dtype], view.storage_offset()
        start, stop = max(own.start - first, 0), min(own.stop - first, parameter.numel())
        if start < stop:
            part = slice(start, stop)
            shards.append(_Shard(index, names[index], part, view.view(-1)[part]))
    return shards
