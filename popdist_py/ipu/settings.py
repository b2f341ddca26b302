"""What a run is asked to do: the options that change memory, schedule or time on the device.

Nothing here computes. Defaults are PopTorch's.
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
    # One pipeline step holds forwards and backwards together, as PopART's does.
    "grouped",
    "interleaved",
    "sequential",
    "sharded",
    "serial phased",
    "parallel phased",
]
# "stage" keeps what enters a stage and what is marked as a checkpoint; "norm" makes norms and what
# follows them again; "default" is "stage" in pipelines over more than one IPU, else "none".
Recompute: TypeAlias = Literal["default", "none", "norm", "stage"]
OutputMode: TypeAlias = Literal["final", "all", "sum", "every n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What an optimiser keeps for each element of a trained weight.

    Attributes:
        state: types of its tensors: moments, velocity.
        accumulator: type of the accumulated gradient.
        is_combined: whether gradients are accumulated into the first tensor of the state.
    """

    state: tuple[Type, ...] = ()
    accumulator: Type = "float32"
    is_combined: bool = False


SGD: Final = Optimizer()
MOMENTUM: Final = Optimizer(state=("float32",))
ADAM: Final = Optimizer(state=("float32", "float32"))
# The types of the half-precision example: second moments stay in float32.
HALF_ADAM: Final = Optimizer(state=("float16", "float32"), accumulator="float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where tensors of one sort lie, as ``TensorLocationSettings``.

    Attributes:
        on_chip: False for Streaming Memory.
        is_sharded: whether each replica keeps a part (replicated tensor sharding).
        min_off_chip: tensors with fewer elements stay on the chip.
        min_sharded: tensors with fewer elements are kept whole.
    """

    on_chip: bool = True
    is_sharded: bool = False
    min_off_chip: int = 2
    min_sharded: int = 8192

    def held(self, elements: int, replicas: int) -> int:
        """Return how many elements of a tensor a replica keeps on the chip all the time."""
        return 0 if self.is_off_chip(elements) else self.part(elements, replicas)

    def part(self, elements: int, replicas: int) -> int:
        """Return how many elements of a tensor belong to a replica, wherever they lie."""
        sharded = self.is_sharded and elements >= self.min_sharded
        return -(-elements // replicas) if sharded else elements

    def is_off_chip(self, elements: int) -> bool:
        """Return whether a tensor of so many elements lies in Streaming Memory."""
        return not self.on_chip and elements >= self.min_off_chip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a run.

    Attributes:
        is_training: whether there is a backward and an update.
        strategy: how stages follow one another.
        accumulation: micro-batches of an update, 1 for inference.
        device_iterations: updates of a call; micro-batches of a call for inference.
        replicas: over all instances.
        optimizer: what it keeps.
        recompute: what is kept for the backward.
        recomputes_last: whether the last stage of a pipeline recomputes too. It has its backward
            at once; PopTorch does so where a ``recomputationCheckpoint`` stands in it (uncertain).
        weight_location: of weights; likewise the other three.
        partials: type of the sums inside products.
        matmul_partials: type of the sums inside matrix products that are not convolutions; None
            for ``partials``.
        memory_proportion: available memory proportion of products, for all IPUs or for each.
        matmul_proportion: available memory proportion of matrix products that are not
            convolutions; None for ``memory_proportion``.
        io_tiles: tiles that only load and store; their memory is not the others'.
        overlaps_io: whether inputs and outputs are marked to be loaded and stored by I/O tiles
            while the others compute. Without it I/O tiles have no part in what the host sends.
        output_mode: what the host gets of a call; None is PopTorch's: "final" when training.
        output_return_period: N of "every n": it divides the device iterations.
        synthetic_data: whether nothing comes from the host or goes there.
        is_profiled: whether tiles count the cycles of each program for a profile.

    Raises:
        ValueError: a number that has to be positive is not, that of I/O tiles is none that PopTorch
            takes, there are none to overlap with, or N does not divide the device iterations.
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
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if not self.is_training and self.accumulation != 1:
            raise ValueError(f"accumulation is {self.accumulation}: inference updates nothing")
        if self.io_tiles % 2 or (self.io_tiles and not 32 <= self.io_tiles <= 192):
            raise ValueError(
                f"io_tiles is {self.io_tiles}: 0 or an even number from 32 to 192 is needed"
            )
        if self.overlaps_io and not self.io_tiles:
            raise ValueError("overlaps_io is set and io_tiles is 0: from 32 to 192 are needed")
        if self.output_mode == "every n" and self.device_iterations % self.output_return_period:
            raise ValueError(
                f"output_return_period is {self.output_return_period}: it has to divide "
                f"device_iterations, {self.device_iterations}"
            )
        for name in ("memory_proportion", "matmul_proportion"):
            given = getattr(self, name)
            if given is not None and any(not 0 < value <= 1 for value in _of_each(given)):
                raise ValueError(f"{name} is {given}: expected numbers above 0 and at most 1")

    @property
    def is_pipelined(self) -> bool:
        """Whether several micro-batches are in flight at a time."""
        return self.strategy in ("grouped", "interleaved")

    @property
    def is_phased(self) -> bool:
        """Whether weights and activations move between the chip and Streaming Memory."""
        return self.strategy in ("serial phased", "parallel phased")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a call."""
        return self.accumulation * self.device_iterations

    @property
    def one_window(self) -> Settings:
        """The same run with a single update in each call; an inference run stays as it is.

        The N of "every N" is 1 in it, because N divides the number of device iterations.
        """
        if not self.is_training:
            return self
        return replace(self, device_iterations=1, output_return_period=1)

    @property
    def returned_micro_batches(self) -> int:
        """Micro-batches of a replica whose outputs the host gets of a call."""
        mode = self.output_mode or ("final" if self.is_training else "all")
        if mode == "every n":
            return self.micro_batches // self.output_return_period
        return self.micro_batches if mode == "all" else 1

    def proportion(self, ipu: int, *, is_convolution: bool = True) -> float:
        """Return the available memory proportion of an IPU; the last one given holds further on.

        Args:
            ipu: the number of the IPU.
            is_convolution: True for convolutions, False for other matrix products.
        """
        is_other = not is_convolution and self.matmul_proportion is not None
        values = _of_each(self.matmul_proportion if is_other else self.memory_proportion)
        return values[min(ipu, len(values) - 1)]

    def partials_of(self, *, is_convolution: bool) -> Type:
        """Return the type of the sums inside convolutions, or inside other products."""
        return self.partials if is_convolution else self.matmul_partials or self.partials

    def recompute_for(self, placement: Placement) -> Recompute:
        """Return what is kept, the default looked up."""
        if not self.is_training:
            return "none"
        if self.recompute != "default":
            return self.recompute
        return "stage" if self.is_pipelined and placement.num_ipus > 1 else "none"

    def recomputing(self, placement: Placement) -> frozenset[int]:
        """Return the stages that make their activations again."""
        if self.recompute_for(placement) == "none":
            return frozenset()
        alone = placement.num_stages == 1 or not self.is_pipelined or self.recomputes_last
        return frozenset(range(placement.num_stages - (0 if alone else 1)))


def _of_each(given: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """Return a setting for all IPUs, or for each, as a tuple; empty if it is not given."""
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)
