"""The state of a training on host and device, as tensors and plain values: for checkpoints.

Functions of a user's module, its optimiser and its compiled model. Files, and the position in the
data, are ``poptorch/checkpoint.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popdist_py import context
from popdist_py.poptorch.compilation.compiler import Compiled
from popdist_py.poptorch.model.optimizer_link import OptimizerLink
from popdist_py.poptorch.update.compression import CompressedGradients

__all__ = ["instance_state", "load_device_state", "load_host_state", "own_state", "shared_state"]


def shared_state(module: nn.Module, link: OptimizerLink) -> dict[str, Any]:
    """Return the weights and the optimiser, which all instances have alike."""
    return {
        "model": dict(module.state_dict()),
        "settings": link.settings(),
        "attributes": link.attributes(),
        "optimizer": link.state_tensors(),
        "rates": link.loaded_rates(),
        "loss_scaling": link.loss_scaling(),
        "scheduler": link.scheduler_state(),
    }


def instance_state(module: nn.Module, compiled: Compiled) -> dict[str, Any]:
    """Return what each instance has of its own.

    The buffers of the host and of its replicas, and what compressed gradients left out.
    """
    state = {
        "host_buffers": dict(module.named_buffers()),
        "buffers": {name: rows.clone() for name, rows in _buffers_of_replicas(compiled).items()},
    }
    compression = _compression_of(compiled)
    if compression is not None:
        state["compression"] = compression.state()
    return state


def own_state(instances: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of this instance among those that were saved.

    Another number of instances than before has no own states: each takes that of instance 0.
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
    """Give the user's module and optimiser what was saved of them."""
    module.load_state_dict(shared["model"])
    link.load_settings(shared["settings"])
    link.load_attributes(shared.get("attributes", {}))  # not saved by earlier versions
    link.load_scheduler_state(shared.get("scheduler"))  # likewise
    module.load_state_dict(own_state(instances)["host_buffers"], strict=False)


def load_device_state(
    compiled: Compiled,
    link: OptimizerLink,
    shared: Mapping[str, Any],
    instances: Sequence[Mapping[str, Any]],
) -> None:
    """Give the compiled model what only the device holds."""
    link.load_rates(shared.get("rates", {}))  # not saved by earlier versions
    link.load_state_tensors(shared["optimizer"])
    link.load_loss_scaling(shared.get("loss_scaling"))  # not saved by earlier versions
    communicator = context.communicator()
    for name, rows in _buffers_of_replicas(compiled).items():
        rows_of_all = torch.cat([state["buffers"].get(name, rows[:0]) for state in instances])
        # Another number of replicas than before has those of replica 0, as the host does.
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
    """Return the buffers that the model changes, [local replicas, ...], in the device's memory."""
    return compiled.state.buffers_of_replicas(compiled.executable.first_forward.modified_buffers)
