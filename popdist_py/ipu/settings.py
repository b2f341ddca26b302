"""The options of a run that change its memory, schedule or time on IPUs.

The default values of the options are those of PopTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from popdist_py.ipu.graph import Placement, Type

__all__ = [
    "ADAM",
    "HALF_ADAM",
    "MOMENTUM",
    "SGD",
    "Location",
    "Optimizer",
    "OutputMode",
    "Recompute",
    "Settings",
    "Strategy",
]

Strategy: TypeAlias = Literal[
    # The strategy "grouped" is PopART's pipeline, whose pipeline cycles contain forward and
    # backward passes.
    "grouped",
    "interleaved",
    "sequential",
    "sharded",
    "serial phased",
    "parallel phased",
]
# The kinds of recomputation, which decide which activations an IPU keeps for the backward pass.
# With "none", an IPU keeps every tensor that the backward pass reads. With "stage", an IPU keeps
# only the inputs of a pipeline stage and the tensors marked as checkpoints. With "standard", an IPU
# also keeps the tensors that PopART chooses as checkpoints. With "norm", an IPU recomputes
# normalisations and the element-wise operations that follow them. The kind "default" means "stage"
# in pipelines over more than one IPU, and "none" in all other runs.
Recompute: TypeAlias = Literal["default", "none", "norm", "standard", "stage"]
OutputMode: TypeAlias = Literal["final", "all", "sum", "every n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """The values that an optimiser stores for each element of a trained weight.

    Attributes:
        state: The element types of the optimiser's state tensors, such as moments or velocity.
        accumulator: The element type of the accumulated gradients.
        is_combined: Whether gradients are accumulated directly into the first state tensor of the
            optimiser.
    """

    state: tuple[Type, ...] = ()
    accumulator: Type = "float32"
    is_combined: bool = False


SGD: Final = Optimizer()
MOMENTUM: Final = Optimizer(state=("float32",))
ADAM: Final = Optimizer(state=("float32", "float32"))
# ``HALF_ADAM`` uses the element types of Graphcore's half-precision example, which stores Adam's
# second moments in float32.
HALF_ADAM: Final = Optimizer(state=("float16", "float32"), accumulator="float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """The memory that stores tensors of one kind, as in PopTorch's ``TensorLocationSettings``.

    The kinds of tensors are weights, gradient accumulators, optimiser state and activations.

    Attributes:
        on_chip: Whether the tensors are stored in the IPU's own memory. If ``on_chip`` is False,
            the tensors are stored in Streaming Memory (DRAM outside the IPU).
        is_sharded: Whether each replica stores only a part of each tensor (replicated tensor
            sharding).
        min_off_chip: The smallest number of elements of a tensor that is stored in Streaming
            Memory. Tensors with fewer elements than ``min_off_chip`` stay on the chip.
        min_sharded: The smallest number of elements of a tensor that is divided among the replicas.
            Every replica stores all elements of a tensor with fewer elements than ``min_sharded``.
    """

    on_chip: bool = True
    is_sharded: bool = False
    min_off_chip: int = 2
    min_sharded: int = 8192

    def held(self, elements: int, replicas: int) -> int:
        """Return the number of a tensor's elements that a replica always stores on the chip."""
        return 0 if self.is_off_chip(elements) else self.part(elements, replicas)

    def part(self, elements: int, replicas: int) -> int:
        """Return the number of a tensor's elements that a replica stores, on or off the chip."""
        sharded = self.is_sharded and elements >= self.min_sharded
        return -(-elements // replicas) if sharded else elements

    def is_off_chip(self, elements: int) -> bool:
        """Return whether a tensor with ``elements`` elements is stored in Streaming Memory."""
        return not self.on_chip and elements >= self.min_off_chip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a run (training or inference of a model), such as the number of replicas.

    Attributes:
        is_training: Whether the run has a backward pass and updates weights.
        strategy: The execution strategy, which determines the order in which the stages of the
            model run.
        accumulation: The number of micro-batches per weight update (gradient accumulation); 1 for
            inference.
        device_iterations: The number of weight updates per call of the model. For inference,
            ``device_iterations`` is the number of micro-batches per call of the model.
        replicas: The number of replicas of all instances together.
        optimizer: The element types of the optimiser's state and of its accumulated gradients.
        recompute: The kind of recomputation, which decides which tensors are kept for the backward
            pass.
        recomputes_last: Whether the last stage of a pipeline also recomputes activations. The last
            stage of a pipeline does not need recomputation, because its backward pass immediately
            follows its forward pass. PopTorch recomputes activations in the last stage if the stage
            contains a ``recomputationCheckpoint`` (this is uncertain).
        weight_location: The memory (on the chip or outside) that stores weights.
        accumulator_location: The memory (on the chip or outside) that stores accumulated gradients.
        optimizer_location: The memory (on the chip or outside) that stores the optimiser's state.
        activation_location: The memory (on the chip or outside) that stores the activations that
            the backward pass reads.
        partials: The type of the partial sums inside convolutions and other matrix products.
        matmul_partials: The type of the partial sums inside matrix products that are not
            convolutions. If ``matmul_partials`` is None, ``partials`` applies to all matrix
            products.
        memory_proportion: The available memory proportion of convolutions and other matrix
            products. The proportion is the share of an IPU's memory that one matrix product may use
            for temporary data. ``memory_proportion`` is one number for all IPUs or a tuple of one
            number per IPU.
        matmul_proportion: The available memory proportion of matrix products that are not
            convolutions. If ``matmul_proportion`` is None, ``memory_proportion`` applies to all
            matrix products.
        io_tiles: The number of I/O tiles, which only transfer data. The tiles that compute cannot
            use the memory of I/O tiles.
        overlaps_io: Whether I/O tiles load inputs and store outputs while the other tiles compute.
            If ``overlaps_io`` is False, I/O tiles do not take part in transfers from and to the
            host.
        output_mode: PopTorch's output mode, which decides which outputs the host gets from a call.
            If ``output_mode`` is None, a call returns the outputs of the last micro-batch ("final")
            for training, and of all micro-batches ("all") for inference.
        output_return_period: The number N of the output mode "every n", with which a call returns
            the outputs of every Nth micro-batch. ``output_return_period`` must divide
            ``device_iterations``.
        synthetic_data: Whether the run uses synthetic data, so that no data is transferred from or
            to the host.
        is_profiled: Whether the program on the IPU counts clock cycles for a profile.

    Raises:
        ValueError: One of the attributes has a value that is not allowed. ``accumulation``,
            ``device_iterations``, ``replicas`` and ``output_return_period`` must be at least 1. The
            attribute ``accumulation`` must be 1 for inference. ``io_tiles`` must be a number of I/O
            tiles that PopTorch accepts, and must not be 0 if ``overlaps_io`` is set.
            ``output_return_period`` must divide ``device_iterations``. The numbers in
            ``memory_proportion`` and ``matmul_proportion`` must be above 0 and at most 1.
    """

    is_training: bool = True
    strategy: Strategy = "grouped"
    accumulation: int = 1
    device_iterations: int = 1
    replicas: int = 1
    optimizer: Optimizer = SGD
    recompute: Recompute = "default"
    recomputes_last: bool = False
    weight_location: Location = field(default_factory=Location)
    accumulator_location: Location = field(default_factory=Location)
    optimizer_location: Location = field(default_factory=Location)
    activation_location: Location = field(default_factory=Location)
    partials: Type = "float32"
    matmul_partials: Type | None = None
    memory_proportion: float | tuple[float, ...] = 0.6
    matmul_proportion: float | tuple[float, ...] | None = None
    io_tiles: int = 0
    overlaps_io: bool = False
    output_mode: OutputMode | None = None
    output_return_period: int = 1
    synthetic_data: bool = False
    is_profiled: bool = False

    def __post_init__(self) -> None:
        for name in ("accumulation", "device_iterations", "replicas", "output_return_period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not self.is_training and self.accumulation != 1:
            raise ValueError(
                f"accumulation is {self.accumulation}: expected 1 for inference, which does not "
                "update weights"
            )
        if self.io_tiles % 2 or (self.io_tiles and not 32 <= self.io_tiles <= 192):
            raise ValueError(
                f"io_tiles is {self.io_tiles}: expected 0 or an even number from 32 to 192"
            )
        if self.overlaps_io and not self.io_tiles:
            raise ValueError(
                "overlaps_io is True and io_tiles is 0: set io_tiles to an even number from 32 to "
                "192"
            )
        if self.output_mode == "every n" and self.device_iterations % self.output_return_period:
            raise ValueError(
                f"output_return_period is {self.output_return_period}: expected a divisor of "
                f"device_iterations, which is {self.device_iterations}"
            )
        for name in ("memory_proportion", "matmul_proportion"):
            given = getattr(self, name)
            if given is not None and any(not 0 < value <= 1 for value in _of_each(given)):
                raise ValueError(
                    f"{name} is {given}: expected numbers that are above 0 and at most 1"
                )

    @property
    def is_pipelined(self) -> bool:
        """Whether the run is a pipeline, which processes several micro-batches at the same time."""
        return self.strategy in ("grouped", "interleaved")

    @property
    def is_phased(self) -> bool:
        """Whether each part of the model is loaded onto its IPU just before it runs (phases)."""
        return self.strategy in ("serial phased", "parallel phased")

    @property
    def has_accumulators(self) -> bool:
        """Whether gradients are accumulated in tensors of their own.

        A combined optimiser accumulates gradients directly into its first state tensor.
        """
        return self.is_training and self.accumulation > 1 and not self.optimizer.is_combined

    @property
    def gradient_type(self) -> Type:
        """The element type of the tensors to which every micro-batch adds its gradients."""
        optimizer = self.optimizer
        if optimizer.is_combined and optimizer.state:
            return optimizer.state[0]
        return optimizer.accumulator

    @property
    def state_location(self) -> Location:
        """The memory that stores the optimiser's state.

        The option ``optimizer_location`` has no effect on a combined optimiser, because every
        micro-batch adds its gradients to the first state tensor.
        """
        return Location() if self.optimizer.is_combined else self.optimizer_location

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that a replica processes in one call of the model."""
        return self.accumulation * self.device_iterations

    @property
    def one_window(self) -> Settings:
        """These settings with one weight update per call; for inference, the settings themselves.

        In training, ``output_return_period`` becomes 1, because it must divide
        ``device_iterations``, which becomes 1.
        """
        if not self.is_training:
            return self
        return replace(self, device_iterations=1, output_return_period=1)

    @property
    def returned_micro_batches(self) -> int:
        """The number of a replica's micro-batches whose outputs the host gets in one call."""
        mode = self.output_mode or ("final" if self.is_training else "all")
        if mode == "every n":
            return self.micro_batches // self.output_return_period
        return self.micro_batches if mode == "all" else 1

    def proportion(self, ipu: int, *, is_convolution: bool = True) -> float:
        """Return the available memory proportion of an IPU.

        The available memory proportion is the share of the IPU's memory that a matrix product may
        use for temporary data. If the settings give fewer memory proportions than there are IPUs,
        the last memory proportion applies to the remaining IPUs.

        Args:
            ipu: The number of the IPU.
            is_convolution: Whether to return the memory proportion for convolutions. If
                ``is_convolution`` is False, the function returns the memory proportion for matrix
                products that are not convolutions.
        """
        is_other = not is_convolution and self.matmul_proportion is not None
        values = _of_each(self.matmul_proportion if is_other else self.memory_proportion)
        return values[min(ipu, len(values) - 1)]

    def partials_of(self, *, is_convolution: bool) -> Type:
        """Return the element type of partial sums inside convolutions or other matrix products."""
        return self.partials if is_convolution else self.matmul_partials or self.partials

    def recompute_for(self, placement: Placement) -> Recompute:
        """Return the kind of recomputation; "default" is replaced by "stage" or "none"."""
        if not self.is_training:
            return "none"
        if self.recompute != "default":
            return self.recompute
        return "stage" if self.is_pipelined and placement.num_ipus > 1 else "none"

    def recomputing(self, placement: Placement) -> frozenset[int]:
        """Return the numbers of the stages that recompute activations for the backward pass."""
        if self.recompute_for(placement) == "none":
            return frozenset()
        # PopART's choice of checkpoints does not regard the stages, and recomputes in all of them.
        alone = placement.num_stages == 1 or not self.is_pipelined
        alone = alone or self.recomputes_last or self.recompute == "standard"
        return frozenset(range(placement.num_stages - (0 if alone else 1)))


def _of_each(given: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """Return the given memory proportions as a tuple, which is empty for None.

    The returned tuple contains one memory proportion for all IPUs or one memory proportion per IPU.
    """
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)
