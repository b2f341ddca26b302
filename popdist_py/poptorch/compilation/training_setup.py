"""The class TrainingSetup, which chooses how gradients are reduced and weights are updated.

The compiler calls TrainingSetup.make(). The code for the gradient reduction and the weight update
depends on the options of the model, the optimiser, and the other instances of the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.signature import Signature
from popdist_py.environment import CollectiveSettings
from popdist_py.poptorch import enums
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.tracing.first_forward import FirstForward
from popdist_py.poptorch.update.compressed.compression import CompressedGradients
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer, parameter_groups
from popdist_py.poptorch.update.gradients import Gradients, SharedGradients, TreeGradients
from popdist_py.poptorch.update.half_accumulators import keep_half_state
from popdist_py.poptorch.update.loss_scaling import AutomaticLossScaling
from popdist_py.poptorch.update.shared_optimizer import SharedOptimizer, can_share
from popdist_py.poptorch.update.training import Training
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["TrainingSetup"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """Chooses the code that reduces gradients and updates the weights of a training model.

    Attributes:
        options: The options of the PopTorch model.
        optimizer: The user's optimiser.
        communicator: The communicator that connects the instances.
    """

    options: Options
    optimizer: torch.optim.Optimizer
    communicator: Communicator

    def make(
        self, first_forward: FirstForward, state: DeviceState, seed_update: Callable[[int], None]
    ) -> Training:
        """Return the object that reduces the gradients and updates the weights of a model.

        Args:
            first_forward: The facts about the model that were found when its first forward pass was
                traced, such as the buffers that the forward pass changes.
            state: The parameters and buffers on the device.
            seed_update: A function that seeds the random generator for a weight update. The
                argument of ``seed_update`` is the number of the micro-batch that runs just before
                the weight update.
        """
        compression = self._compression()
        used = _same_group(first_forward.used_parameters, state)
        groups = parameter_groups(self.optimizer, state.device_tensors, used)
        parameters = [parameter for group in groups for parameter in group]
        if used and not parameters:
            logger.warning(
                "No parameter is trained: the loss does not depend on the parameters of the "
                "optimizer. Make the optimizer from the parameters of the wrapped module, not from "
                "a copy of these parameters"
            )
        # Gradients are computed only for parameters that the optimiser updates.
        trained = {id(parameter) for parameter in parameters}
        for parameter in used.values():
            parameter.requires_grad_(id(parameter) in trained)
        replicas = self.options.replication_factor
        optimizer: DeviceOptimizer
        gradients: Gradients
        if self._updates_slices(first_forward, state, parameters):
            gradients = SharedGradients(parameters, self.communicator, False, slices_only=True)
            optimizer = SharedOptimizer(
                self.optimizer,
                state.device_tensors,
                used,
                parameters=parameters,
                gradients=gradients.views,
                communicator=self.communicator,
            )
        else:
            if self.options.Emulator.deterministic_reduction:
                gradients = TreeGradients(parameters, self.communicator, replicas)
            else:
                gradients = SharedGradients(
                    parameters,
                    self.communicator,
                    self._overlap,
                    reduction_of=compression.reduction if compression else None,
                )
            optimizer = DeviceOptimizer(
                self.optimizer,
                state.device_tensors,
                used,
                stochastic_rounding=self.rounds_at_random,
            )
        keep_half_state(optimizer._optimizer, self.optimizer)
        return Training(
            optimizer=optimizer,
            gradients=gradients,
            gradient_scale=self._gradient_scale(replicas * self.communicator.num_instances),
            half_accumulators=self._has_half_accumulators,
            scaler=self._scaler(),
            rounding=seed_update if self.rounds_at_random else None,
            compression=compression,
        )

    def _compression(self) -> CompressedGradients | None:
        """Return the compression of gradients between hosts; None if gradients are not compressed.

        Raises:
            CollectiveMismatchError: The instances have different compression settings.
            Error: The options enable both compression and deterministic reduction of gradients.
        """
        wanted = self.options.Training.gradient_compression_settings
        if self.communicator.num_instances > 1:
            self.communicator.agree(
                Signature("Options.Training.gradientCompression", _in_words(wanted))
            )
        method = wanted.pop("method")
        if method == "none":
            return None
        if self.options.Emulator.deterministic_reduction:
            raise Error(
                f"Options.Training.gradientCompression({method!r}) cannot be used with "
                "deterministicReduction or POPDIST_DETERMINISTIC=1. Deterministic reduction gives "
                "the same bits for each split of the replicas into instances, but the result of "
                "compression depends on the split of the instances into hosts. Switch one of the "
                "two options off"
            )
        links = self.communicator.host_links
        if links is None:
            if self.communicator.instance_index == 0:
                logger.info(
                    "Options.Training.gradientCompression(%r) has no effect: %s",
                    method,
                    "the instances on a host do not use shared memory (POPDIST_SHARED_MEMORY)"
                    if self.communicator.spans_hosts
                    else (
                        "all instances run on one host, and only gradients between hosts are "
                        "compressed"
                    ),
                )
            return None
        return CompressedGradients(method, wanted, self.communicator, links)

    def _updates_slices(
        self, first_forward: FirstForward, state: DeviceState, parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Tell whether instances share weights, so that each instance updates one slice of them."""
        return (
            self._settings.shared_weights
            and can_share(self.optimizer, parameters, self.communicator)
            and not self._overlap
            # The bits of a weight update may depend on the index of the first element in the
            # updated slice of the weights.
            and not self.options.Emulator.deterministic_reduction
            and not state.has_groups
            # If forward passes change shared weights, the forward pass of one instance would change
            # the weights of all instances.
            and not first_forward.modified_parameters
        )

    def _scaler(self) -> AutomaticLossScaling | None:
        if not self._scales_automatically:
            return None
        return AutomaticLossScaling(
            self.communicator, **self.options.Training.automatic_loss_scaling_settings
        )

    @property
    def _has_half_accumulators(self) -> bool:
        return getattr(self.optimizer, "accum_type", torch.float32) == torch.float16

    @property
    def rounds_at_random(self) -> bool:
        """Whether updates of float16 parameters use stochastic rounding."""
        return self.options.Precision.stochastic_rounding

    @property
    def _scales_automatically(self) -> bool:
        return self.options.Training.automatic_loss_scaling

    def _gradient_scale(self, replicas: int) -> float:
        training = self.options.Training
        if training.accumulation_and_replication_reduction_type == enums.ReductionType.Sum:
            return 1.0
        return 1.0 / (int(training.gradient_accumulation) * replicas)

    @property
    def _overlap(self) -> bool | None:
        """Whether the backward pass reduces gradients; None to measure the faster way."""
        if self._has_half_accumulators or self._scales_automatically:
            # Float16 accumulators and automatic loss scaling use an instance's gradients before the
            # reduction between instances. An instance's gradients are complete only after the
            # backward passes of all its replicas.
            return False
        if self.options.Training.norm_group_size > 1:
            # During the backward pass, batch norms of a replica group exchange statistics between
            # instances. The exchanges of batch norm statistics must not wait for the reduction of
            # gradients.
            return False
        return self._settings.gradient_overlap

    @property
    def _settings(self) -> CollectiveSettings:
        return CollectiveSettings.from_environ(os.environ)


def _in_words(settings: Mapping[str, Any]) -> str:
    """Format compression settings as Python arguments, for example ``'powersgd', rank=2``."""
    method, *others = settings.items()
    return ", ".join([repr(method[1]), *(f"{name}={value!r}" for name, value in others)])


def _same_group(used: frozenset[str], state: DeviceState) -> dict[str, torch.Tensor]:
    """Return the parameters that the model uses, with every replica group's copy, by name.

    The first forward pass uses only one replica group's copy of a replica-grouped parameter (a
    parameter whose values differ between groups of replicas). Other replica groups use their own
    copies of a replica-grouped parameter in later forward passes.
    """
    stems = {name.partition("[")[0] for name in used if name.endswith("]")}
    return {
        name: parameter
        for name, parameter in state.parameters.items()
        if name in used or (name.endswith("]") and name.partition("[")[0] in stems)
    }
