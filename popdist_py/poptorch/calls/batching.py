"""The batching contract: how a call's samples become micro-batches, and outputs a result.

Samples per call = micro-batch x device iterations x (R / G) x gradient accumulation; the order is
row-major over [device iteration][accumulation step][replica group][micro-batch]. The only place
that cuts inputs: into combined micro-batches, which all replicas get at once, and these by replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from popdist_py.poptorch import enums
from popdist_py.poptorch.errors import Error

__all__ = ["Batching", "Collector", "Values", "check_groups"]

# One output of all replicas: a tensor for each, or one tensor [replicas, ...].
Values = Sequence[torch.Tensor] | torch.Tensor


def check_groups(replicas: int, group_size: int, group_type: enums.CommGroupType) -> None:
    """Check that the replicas can be divided into groups that share their inputs.

    Raises:
        ValueError: the type is neither Consecutive nor Orthogonal, or the group size is larger
            than the number of replicas or does not divide it.
    """
    known = (enums.CommGroupType.Consecutive, enums.CommGroupType.Orthogonal)
    if group_type not in known:
        raise ValueError(
            f"inputReplicaGrouping: CommGroupType.{group_type.name} is not supported: choose "
            "Consecutive or Orthogonal, or NoGrouping for none"
        )
    if not 1 <= group_size <= replicas or replicas % group_size:
        raise ValueError(
            f"inputReplicaGrouping: group size {group_size} must divide the replication factor "
            f"{replicas} and be at most as large: set a larger replication factor before the group "
            "size, and a smaller one after it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """The batching factors of one model (DI, GA, R, G), and the outputs that are returned.

    Raises:
        ValueError: the replicas cannot be divided into these groups.
    """

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    group_size: int
    group_type: enums.CommGroupType
    output_mode: enums.OutputMode
    output_period: int

    def __post_init__(self) -> None:
        # Checked again, as options saved by an earlier version were not checked when they were set.
        check_groups(self.replicas, self.group_size, self.group_type)

    @property
    def num_groups(self) -> int:
        """Number of replica groups R / G that read different inputs."""
        return self.replicas // self.group_size

    @property
    def num_steps(self) -> int:
        """Micro-batches that one replica runs in one call: DI x GA."""
        return self.device_iterations * self.gradient_accumulation

    @property
    def num_slices(self) -> int:
        """Slices that every input is cut into: DI x (R / G) x GA."""
        return self.num_steps * self.num_groups

    def check(self) -> None:
        """Check that the output mode fits the number of device iterations.

        Raises:
            Error: the period of EveryN does not divide the device iterations.
        """
        if self.output_mode == enums.OutputMode.EveryN and (
            self.device_iterations % self.output_period
        ):
            raise Error(
                f"OutputMode.EveryN: the period {self.output_period} must divide "
                f"Options.deviceIterations({self.device_iterations})"
            )

    def micro_batch(self, shape: Sequence[int]) -> int:
        """Return the micro-batch of an input of this shape; a 0-d one counts as one row.

        Raises:
            AssertionError: the first dimension is not divisible by the factors.
        """
        size = shape[0] if len(shape) else 1
        assert size % self.num_slices == 0, (
            f"Invalid batch dimension: In the input {list(shape)}, the batch dimension ({size}) "
            f"must be a multiple of Options.deviceIterations({self.device_iterations}) * "
            f"(Options.replicationFactor({self.replicas}) / "
            f"Options.inputReplicaGrouping({self.group_size})) * "
            f"Options.Training.gradientAccumulation({self.gradient_accumulation}) = "
            f"{self.num_slices} because it is used to calculate the batch size which will be "
            "executed on the device in any given iteration."
        )
        return size // self.num_slices

    def combined_micro_batches(
        self, inputs: Sequence[torch.Tensor]
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Cut the inputs of a call into what all replicas get at once, for each of DI x GA steps.

        A combined micro-batch of an input is [replica groups x micro-batch, ...].
        """
        steps = self.num_steps
        if steps == 1:
            return [inputs]
        parts = [tensor.split(tensor.shape[0] // steps) for tensor in inputs]
        return [[part[step] for part in parts] for step in range(steps)]

    def per_replica(self, combined: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a combined micro-batch into what each replica gets: R views [micro-batch, ...]."""
        groups = self.num_groups
        if groups == 1:
            return [combined] * self.replicas
        parts = combined.split(combined.shape[0] // groups)
        return [parts[self._group_of(replica)] for replica in range(self.replicas)]

    def inputs_of_replicas(self, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return what each replica gets of the combined micro-batches of all inputs."""
        if self.group_size == self.replicas:
            return [list(inputs)] * self.replicas
        parts = [self.per_replica(combined) for combined in inputs]
        return [[part[replica] for part in parts] for replica in range(self.replicas)]

    def stacked(self, combined: torch.Tensor) -> torch.Tensor:
        """Return a combined micro-batch as one tensor [R, micro-batch, ...]."""
        groups = self.num_groups
        parts = combined.view(groups, combined.shape[0] // groups, *combined.shape[1:])
        if self.group_size == 1:
            return parts
        is_orthogonal = self.group_type == enums.CommGroupType.Orthogonal
        sizes = (self.group_size, groups) if is_orthogonal else (groups, self.group_size)
        shared = parts.unsqueeze(0 if is_orthogonal else 1)
        expanded = shared.expand(*sizes, *parts.shape[1:])
        # A captured graph views its inputs, which it can only if they lie in memory as they are.
        return expanded.reshape(self.replicas, *parts.shape[1:]).contiguous()

    def _group_of(self, replica: int) -> int:
        """Return the input group of a replica."""
        if self.group_type == enums.CommGroupType.Orthogonal:
            return replica % self.num_groups
        return replica // self.group_size

    def wanted(self, step: int) -> bool:
        """Tell whether the outputs of micro-batch ``step`` (0 to DI x GA - 1) are returned."""
        if self.output_mode == enums.OutputMode.Final:
            return step == self.num_steps - 1
        if self.output_mode == enums.OutputMode.EveryN:
            return (step + 1) % self.output_period == 0
        return True

    @property
    def num_returned(self) -> int:
        """Micro-batches in a result: the multiplier of an output's first dimension."""
        if self.output_mode == enums.OutputMode.All:
            return self.replicas * self.num_steps
        if self.output_mode == enums.OutputMode.EveryN:
            return self.replicas * self.num_steps // self.output_period
        return self.replicas


class Collector:
    """Gathers one output tensor over the micro-batches of a call."""

    def __init__(self, batching: Batching) -> None:
        self._sum = batching.output_mode == enums.OutputMode.Sum
        self._parts: list[torch.Tensor] = []

    def add(self, step: int, values: Values) -> None:
        """Take what the replicas returned for micro-batch ``step``."""
        part = joined(values)
        if self._sum and step > 0:
            self._parts[0] = self._parts[0] + part
        else:
            self._parts.append(part)

    def result(self) -> torch.Tensor:
        """Return everything along dimension 0; a 0-d output stays 0-d only if it is alone."""
        return joined(self._parts)


def joined(values: Values) -> torch.Tensor:
    """Return the tensors of several replicas along dimension 0, where 0-d ones count as one."""
    if isinstance(values, torch.Tensor):
        return values if values.dim() == 1 else values.flatten(0, 1)
    if len(values) == 1:
        return values[0]
    return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
