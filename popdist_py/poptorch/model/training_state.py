"""The training state on the host and the device, as tensors and plain values for checkpoints.

The functions in ``training_state`` take a user's module, its optimiser and its compiled model. The
module ``poptorch/checkpoint.py`` handles the files of checkpoints and the position in the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popdist_py import context
from popdist_py.poptorch.compilation.compiled_model import Compiled
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.update.compressed.compression import CompressedGradients

__all__ = [
    "LiveModule",
    "instance_state",
    "live_module",
    "load_device_state",
    "load_host_state",
    "own_state",
    "shared_state",
]


@dataclass(frozen=True, slots=True)
class LiveModule:
    """The newest tensors of a user's module, in the memory of the device that trains them.

    Attributes:
        model: The ``state_dict()`` of the module.
        buffers: The buffers of the module by name.
    """

    model: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The tensors of ``model`` that only a weight update changes."""
        buffers = {buffer.data_ptr() for buffer in self.buffers.values()}
        return [each for each in self.model.values() if each.data_ptr() not in buffers]


def shared_state(
    module: nn.Module, link: OptimizerLink, live: LiveModule | None = None
) -> dict[str, Any]:
    """Return the state of the user's module and optimiser, which is equal on all instances.

    Args:
        module: The user's module, whose weights are up to date unless ``live`` is given.
        link: The connection to the user's optimiser.
        live: The newest weights in the device's memory. With ``live``, the result also shares the
            memory of the device's optimiser.
    """
    return {
        "model": dict(module.state_dict()) if live is None else live.model,
        "settings": link.settings(),
        "attributes": link.attributes(),
        "optimizer": link.state_tensors(copied=live is None),
        "rates": link.loaded_rates(),
        "loss_scaling": link.loss_scaling(),
        "scheduler": link.scheduler_state(),
    }


def live_module(module: nn.Module, compiled: Compiled) -> LiveModule | None:
    """Return the newest ``state_dict()`` and buffers of the module, without copying its weights.

    The result contains the device's tensors in place of the host's older tensors. It is None if the
    host's tensors are needed: replicas have different weights, tensors of the module share memory,
    or the module computes values for its ``state_dict()``.
    """
    state = compiled.state
    if state.has_groups:
        return None
    device_copies = state.device_copies()
    changed = frozenset(map(id, compiled.changed_tensors()))
    hosts = [*module.parameters(), *module.buffers()]
    # Without this context, a read of the host's tensors would copy all weights to the host.
    with torch._C.DisableTorchFunctionSubclass():
        storages = [host.untyped_storage().data_ptr() for host in hosts if host.numel()]
        if len(set(storages)) < len(storages):
            # A buffer that is a view of a weight is up to date only after the weight was copied.
            return None
        newest = {}
        for host in hosts:
            device = device_copies.get(id(host), host)
            newest[_place(host)] = (device if id(device) in changed else host).detach()
        saved, buffers = module.state_dict(), dict(module.named_buffers())
        known = (isinstance(v, torch.Tensor) and _place(v) in newest for v in saved.values())
        if not all(known):
            return None
        return LiveModule(
            {name: newest[_place(value)] for name, value in saved.items()},
            {name: newest[_place(value)] for name, value in buffers.items()},
        )


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def instance_state(
    module: nn.Module, compiled: Compiled, live: LiveModule | None = None
) -> dict[str, Any]:
    """Return the part of the training state that differs between instances.

    The returned state contains the module's buffers on the host, the buffers of each replica, and
    the state of gradient compression.

    Args:
        module: The user's module, whose buffers are up to date unless ``live`` is given.
        compiled: The compiled model.
        live: The newest tensors of the module.
    """
    state = {
        "host_buffers": dict(module.named_buffers()) if live is None else live.buffers,
        "buffers": {name: rows.clone() for name, rows in _buffers_of_replicas(compiled).items()},
    }
    compression = _compression_of(compiled)
    if compression is not None:
        state["compression"] = compression.state()
    return state


def own_state(instances: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Select the state of this instance from the saved states of all instances.

    If the number of instances has changed, every instance uses the saved state of instance 0.
    """
    communicator = context.communicator()
    same_number = len(instances) == communicator.num_instances
    return instances[communicator.instance_index if same_number else 0]


def load_host_state(
    module: nn.Module,
    link: OptimizerLink,
    shared: Mapping[str, Any],
    instances: Sequence[dict[str, Any]],
) -> None:
    """Restore the saved state of the user's module, optimiser and scheduler."""
    module.load_state_dict(shared["model"])
    link.load_settings(shared["settings"])
    # Checkpoints of earlier versions do not contain the optimiser's attributes and the scheduler's
    # state.
    link.load_attributes(shared.get("attributes", {}))
    link.load_scheduler_state(shared.get("scheduler"))
    module.load_state_dict(own_state(instances)["host_buffers"], strict=False)


def load_device_state(
    compiled: Compiled,
    link: OptimizerLink,
    shared: Mapping[str, Any],
    instances: Sequence[Mapping[str, Any]],
) -> None:
    """Restore the training state on the device, such as the optimiser state."""
    # Checkpoints of earlier versions do not contain the optimiser's rates and the state of loss
    # scaling.
    link.load_rates(shared.get("rates", {}))
    link.load_state_tensors(shared["optimizer"])
    link.load_loss_scaling(shared.get("loss_scaling"))
    communicator = context.communicator()
    for name, rows in _buffers_of_replicas(compiled).items():
        rows_of_all = torch.cat([state["buffers"].get(name, rows[:0]) for state in instances])
        # The saved buffers are used only if the number of replicas is the same as before. If the
        # number of replicas has changed, the replicas keep the buffers that were copied from the
        # host.
        if len(rows_of_all) == communicator.num_instances * len(rows):
            first = communicator.instance_index * len(rows)
            rows.copy_(rows_of_all[first : first + len(rows)])
    compression = _compression_of(compiled)
    if compression is not None and all("compression" in state for state in instances):
        compression.load_states([state["compression"] for state in instances])


def _compression_of(compiled: Compiled) -> CompressedGradients | None:
    training = compiled.program.training
    return None if training is None else training.compression


def _buffers_of_replicas(compiled: Compiled) -> dict[str, torch.Tensor]:
    """Return the buffers on the device that the model changes, by name.

    Each returned tensor has the shape [replicas of this instance, ...] and shares memory with the
    device's buffers.
    """
    return compiled.state.buffers_of_replicas(compiled.executable.first_forward.modified_buffers)
