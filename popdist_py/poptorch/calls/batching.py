"""Functions that cut the inputs of a model call into micro-batches, and that join the outputs.

A model has R replicas (copies), and each group of G replicas gets the same inputs. For R replicas
in groups of G, the number of samples in one call is micro-batch size x device iterations x (R / G)
x gradient accumulation. In an input tensor, the order of samples is row-major over [device
iteration][accumulation step][replica group][micro-batch].

Each input of a call is first cut into combined micro-batches. A combined micro-batch is one tensor
that contains a micro-batch for each replica group. Each combined micro-batch (a tensor for all
replica groups) is then cut into one micro-batch for each replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from popdist_py.poptorch import enums
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger

__all__ = ["Batching", "Collector", "Values", "check_groups", "check_output_mode"]

# One output of the model on all replicas, either as one tensor per replica, or as one tensor of the
# shape [replicas, ...].
Values = Sequence[torch.Tensor] | torch.Tensor


def check_groups(replicas: int, group_size: int, group_type: enums.CommGroupType) -> None:
    """Check that the replicas can be divided into groups that share their inputs.

    Raises:
        ValueError: ``group_type`` is neither Consecutive nor Orthogonal, or ``group_size`` does not
            divide the number of replicas.
    """
    known = (enums.CommGroupType.Consecutive, enums.CommGroupType.Orthogonal)
    if group_type not in known:
        raise ValueError(
            f"Options.inputReplicaGrouping(): CommGroupType.{group_type.name} is not supported. "
            "Expected CommGroupType.Consecutive, Orthogonal or NoGrouping"
        )
    if not 1 <= group_size <= replicas or replicas % group_size:
        raise ValueError(
            f"Options.inputReplicaGrouping(): the group size {group_size} must be a positive "
            f"divisor of the replication factor {replicas}. To raise both numbers, call "
            "Options.replicationFactor() first. To lower both numbers, call "
            "Options.inputReplicaGrouping() first"
        )


def check_output_mode(mode: enums.OutputMode, period: int | None) -> tuple[enums.OutputMode, int]:
    """Check an output mode (which outputs a call returns) and its period, and return the pair.

    The output mode EveryN returns the outputs of every N-th micro-batch, where N is the period. For
    all other output modes, the returned period is 1.

    Raises:
        AssertionError: ``mode`` is not an OutputMode, or the output mode EveryN is given without a
            positive period.
    """
    assert isinstance(mode, enums.OutputMode), (
        f"Invalid output mode {mode!r}: expected a poptorch.OutputMode"
    )
    if mode == enums.OutputMode.EveryN:
        every = period if isinstance(period, int) else 0
        assert every > 0, f"OutputMode.EveryN needs a positive output_return_period, got {period!r}"
        return mode, every
    if period is not None and period != 1:
        logger.info(
            "output_return_period is ignored, because the output mode is %s: only "
            "OutputMode.EveryN uses a period",
            mode.name,
        )
    return mode, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """The numbers that divide a model's inputs into micro-batches, and the outputs to return.

    Attributes:
        device_iterations: The number DI of iterations that the device runs in one call of the
            model.
        gradient_accumulation: The number GA of micro-batches whose gradients are added before each
            update of the weights.
        replicas: The number R of replicas (copies of the model).
        group_size: The number G of replicas in a group that gets the same inputs.
        group_type: The rule that assigns replicas to groups (Consecutive or Orthogonal).
        output_mode: The choice of the micro-batches whose outputs a call of the model returns.
        output_period: The number N of the output mode EveryN, which returns the outputs of every
            N-th micro-batch.

    Raises:
        ValueError: The replicas cannot be divided into groups with the given size and type.
    """

    device_iterations: int
    gradient_accumulation: int
    replicas: int
    group_size: int
    group_type: enums.CommGroupType
    output_mode: enums.OutputMode
    output_period: int

    def __post_init__(self) -> None:
        # A program may load options that an earlier version of this library saved. Earlier versions
        # of this library did not check the replica groups when a program set the options.
        check_groups(self.replicas, self.group_size, self.group_type)

    @property
    def num_groups(self) -> int:
        """The number R / G of replica groups, for R replicas in groups of G.

        Different replica groups get different inputs.
        """
        return self.replicas // self.group_size

    @property
    def num_steps(self) -> int:
        """The number of micro-batches that one replica runs in one call of the model.

        The number is the product of the device iterations and the gradient accumulation.
        """
        return self.device_iterations * self.gradient_accumulation

    @property
    def num_slices(self) -> int:
        """The number of micro-batches of all replica groups into which a call cuts each input."""
        return self.num_steps * self.num_groups

    def check(self) -> None:
        """Check that the output mode fits the number of device iterations.

        Raises:
            Error: The period of the output mode EveryN does not divide the number of device
                iterations.
        """
        if self.output_mode == enums.OutputMode.EveryN and (
            self.device_iterations % self.output_period
        ):
            raise Error(
                f"OutputMode.EveryN: output_return_period is {self.output_period}, and must be a "
                f"divisor of Options.deviceIterations({self.device_iterations})"
            )

    def micro_batch(self, shape: Sequence[int]) -> int:
        """Return the micro-batch size for an input's shape; a 0-d input counts as one row.

        Raises:
            AssertionError: The first dimension of the input is not divisible by ``num_slices``.
        """
        size = shape[0] if len(shape) else 1
        assert size % self.num_slices == 0, (
            f"Invalid batch dimension: In the input {list(shape)}, the batch dimension ({size}) "
            f"must be a multiple of Options.deviceIterations({self.device_iterations}) * "
            f"(Options.replicationFactor({self.replicas}) / "
            f"Options.inputReplicaGrouping({self.group_size})) * "
            f"Options.Training.gradientAccumulation({self.gradient_accumulation}) = "
            f"{self.num_slices}. Each call divides its inputs into {self.num_slices} micro-batches "
            "of equal size"
        )
        return size // self.num_slices

    def combined_micro_batches(
        self, inputs: Sequence[torch.Tensor]
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Cut a call's inputs into combined micro-batches, which are run one after the other.

        A combined micro-batch is one tensor for all replica groups, of the shape [replica groups x
        micro-batch, ...].
        """
        steps = self.num_steps
        if steps == 1:
            return [inputs]
        parts = [tensor.split(tensor.shape[0] // steps) for tensor in inputs]
        return [[part[step] for part in parts] for step in range(steps)]

    def per_replica(self, combined: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each replica's micro-batch, a view of the tensor ``combined`` for all replicas."""
        groups = self.num_groups
        if groups == 1:
            return [combined] * self.replicas
        parts = combined.split(combined.shape[0] // groups)
        return [parts[self._group_of(replica)] for replica in range(self.replicas)]

    def inputs_of_replicas(self, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return each replica's micro-batches, cut from inputs with all replicas' samples."""
        if self.group_size == self.replicas:
            return [list(inputs)] * self.replicas
        parts = [self.per_replica(combined) for combined in inputs]
        return [[part[replica] for part in parts] for replica in range(self.replicas)]

    def stacked(self, combined: torch.Tensor) -> torch.Tensor:
        """Return all replicas' micro-batches in the shape [replicas, micro-batch, ...]."""
        groups = self.num_groups
        parts = combined.view(groups, combined.shape[0] // groups, *combined.shape[1:])
        if self.group_size == 1:
            return parts
        is_orthogonal = self.group_type == enums.CommGroupType.Orthogonal
        sizes = (self.group_size, groups) if is_orthogonal else (groups, self.group_size)
        shared = parts.unsqueeze(0 if is_orthogonal else 1)
        expanded = shared.expand(*sizes, *parts.shape[1:])
        # A recorded graph of operations calls view() on its inputs, and view() requires contiguous
        # tensors.
        return expanded.reshape(self.replicas, *parts.shape[1:]).contiguous()

    def _group_of(self, replica: int) -> int:
        """Return the index of the replica group that contains the given replica."""
        if self.group_type == enums.CommGroupType.Orthogonal:
            return replica % self.num_groups
        return replica // self.group_size

    def wanted(self, step: int) -> bool:
        """Tell whether a call returns the outputs of the micro-batch with the index ``step``."""
        if self.output_mode == enums.OutputMode.Final:
            return step == self.num_steps - 1
        if self.output_mode == enums.OutputMode.EveryN:
            return (step + 1) % self.output_period == 0
        return True

    @property
    def num_returned(self) -> int:
        """The number of micro-batches, summed over all replicas, whose outputs a call returns."""
        if self.output_mode == enums.OutputMode.All:
            return self.replicas * self.num_steps
        if self.output_mode == enums.OutputMode.EveryN:
            return self.replicas * self.num_steps // self.output_period
        return self.replicas


class Collector:
    """Collects the values of one output of the model over the micro-batches of a call."""

    def __init__(self, batching: Batching) -> None:
        self._sum = batching.output_mode == enums.OutputMode.Sum
        self._parts: list[torch.Tensor] = []

    def add(self, step: int, values: Values) -> None:
        """Add one output of all replicas for the micro-batch with the index ``step``."""
        part = joined(values)
        if self._sum and step > 0:
            self._parts[0] = self._parts[0] + part
        else:
            self._parts.append(part)

    def result(self) -> torch.Tensor:
        """Return the collected outputs, concatenated along dimension 0.

        If the collected outputs consist of a single 0-d tensor, the result is 0-d.
        """
        return joined(self._parts)


def joined(values: Values) -> torch.Tensor:
    """Return the tensors of several replicas, concatenated along dimension 0.

    Each 0-d tensor becomes one element of the concatenated tensor. If there is only one replica,
    the tensor of this replica is returned unchanged.
    """
    if isinstance(values, torch.Tensor):
        return values if values.dim() == 1 else values.flatten(0, 1)
    if len(values) == 1:
        return values[0]
    return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
