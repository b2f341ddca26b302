"""The class SourceModel, which stores a module with its options, optimiser and communicator.

The modules ``compiler`` and ``program_builder`` compile a SourceModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popdist_py.collectives import Communicator
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.calls.batching import Batching
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.calls.transfer import Transfer
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.run_from_options import run_from_options
from popdist_py.poptorch.options.options import Options

__all__ = ["SourceModel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceModel:
    """A module with its options, its optimiser and the communicator of the instances.

    Attributes:
        model: The module that runs the forward pass, which is a shallow copy of ``user_model``.
        user_model: The user's module.
        options: The options of the PopTorch model.
        optimizer: The user's optimiser; None for inference.
        transfer: The conversion of tensors between the host and the device.
        communicator: The communicator for calls between the instances. For inference, the
            communicator contains only this instance.
    """

    model: nn.Module
    user_model: nn.Module
    options: Options
    optimizer: torch.optim.Optimizer | None
    transfer: Transfer
    communicator: Communicator

    @property
    def training(self) -> bool:
        """Whether the model is a training model."""
        return self.optimizer is not None

    @property
    def batching(self) -> Batching:
        """The numbers that determine how a call's samples are divided into micro-batches."""
        return self.options.batching(training=self.training)

    @property
    def first_replica(self) -> int:
        """The global index of this instance's first replica."""
        return self.communicator.instance_index * int(self.options.replication_factor)

    def device_run(self, graph: ModelGraph | None) -> Run | None:
        """Return the settings for the device model; None if no device model is used.

        The device model estimates the time and memory that a program needs on an IPU.
        """
        if graph is None:
            return None
        try:
            return run_from_options(graph, self.options, self.optimizer, training=self.training)
        # The emulation can run without the device model, which estimates time and memory on an IPU.
        except ValueError as error:
            logger.debug(
                "The device model cannot estimate time and memory of the model on an IPU: %s", error
            )
            return None

    def forward(self, call: Call, leaves: Sequence[torch.Tensor]) -> Any:
        """Run the model on a call's arguments, after replacing the call's tensors by ``leaves``."""
        args, kwargs = call.arguments(leaves)
        return self.model(*args, **kwargs)
