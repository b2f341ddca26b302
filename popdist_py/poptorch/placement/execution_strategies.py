"""Execution strategies: to which stage and IPU each block of a model goes.

A strategy is data (stages, phases) and one pure decision, ``_placer``, that maps block ids to
places. ``recorder.py`` records the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

from popdist_py.poptorch.enums import AutoStage, Liveness
from popdist_py.poptorch.tracing.block_places import BlockPlace, PlaceBlock

__all__ = [
    "ParallelPhasedExecution",
    "Phase",
    "PipelineSchedule",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
]

PipelineSchedule: TypeAlias = Literal["grouped", "interleaved"]


class Stage:
    """Blocks that run one after the other on one IPU.

    Args:
        *block_ids: ids of the blocks.

    Raises:
        AssertionError: an id is not a string.
    """

    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(block, str) for block in block_ids), (
            f"Block ids are supposed to be strings, got {block_ids}"
        )
        self._blocks = list(block_ids)
        self._ipu_id: int | None = None

    @property
    def blocks(self) -> list[str]:
        """Ids of the stage's blocks."""
        return self._blocks

    def ipu(self, ipu_id: int) -> Stage:
        """Run this stage on the given IPU, whatever its blocks say."""
        self._ipu_id = ipu_id
        return self

    def __repr__(self) -> str:
        ipu = "" if self._ipu_id is None else f".ipu({self._ipu_id})"
        return f"Stage({', '.join(map(repr, self._blocks))}){ipu}"


class _IExecutionStrategy:
    """Any execution strategy."""

    is_pipelined = False

    def _placer(self) -> PlaceBlock:
        raise NotImplementedError(f"{type(self).__name__} cannot place blocks")

    def _description(self) -> tuple[Any, ...]:
        """Return all that was set: equal for strategies that place blocks alike."""
        raise NotImplementedError(f"{type(self).__name__} does not describe itself")

    def stage(self, block_id: str) -> Stage:
        """Return the stage of a block; AssertionError if no stage has it."""
        raise NotImplementedError(f"{type(self).__name__} has no stages")

    def _parts(self) -> Sequence[Any]:
        """Return the stages or phases that make an equal strategy, for its repr()."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._parts()))})"


def _stage_of(spec: Any) -> Stage:
    """Return the stage that a Stage, an id or a list of ids stands for."""
    if isinstance(spec, Stage):
        return spec
    if isinstance(spec, str):
        return Stage(spec)
    assert isinstance(spec, Iterable), (
        f"expected a poptorch.Stage, a block id or a list of block ids, got {type(spec).__name__}"
    )
    return Stage(*spec)


def _index_stages(stages: Iterable[tuple[Stage, Any]]) -> dict[str, tuple[Stage, Any]]:
    """Return stage and position by block id; AssertionError for a block in two stages."""
    by_block: dict[str, tuple[Stage, Any]] = {}
    for stage, position in stages:
        for block in stage.blocks:
            assert block not in by_block, f"{block} is associated with more than one stage"
            by_block[block] = (stage, position)
    return by_block


def _find_stage(by_block: dict[str, tuple[Stage, Any]], block_id: Any) -> tuple[Stage, Any]:
    assert block_id in by_block, (
        f"Unknown Block {block_id!r}: the strategy has the blocks {sorted(by_block)}"
    )
    return by_block[block_id]


def _described(by_block: dict[str, tuple[Stage, Any]]) -> list[tuple[Any, ...]]:
    return [(block, stage._ipu_id, place) for block, (stage, place) in sorted(by_block.items())]


def _choose(stage: Stage, ipu_id: int | None, default: int) -> int:
    """Return the IPU: the stage's own, else the block's, else the default."""
    if stage._ipu_id is not None:
        return stage._ipu_id
    return default if ipu_id is None else ipu_id


class ShardedExecution(_IExecutionStrategy):
    """Stages run one after the other, each on its IPU.

    Args:
        *args: one :class:`AutoStage`, or the stages in order, each given as a Stage, a block id or
            a list of block ids. Without arguments AutoStage.SameAsIpu.

    Raises:
        AssertionError: a block in two stages; an AutoStage beside other arguments.
    """

    def __init__(self, *args: Any) -> None:
        automatic = [arg for arg in args if isinstance(arg, AutoStage)]
        assert not automatic or len(args) == 1, (
            f"an AutoStage cannot be combined with other arguments, got {args}"
        )
        self._auto_stage = automatic[0] if automatic else AutoStage.SameAsIpu if not args else None
        stages = [] if self._auto_stage is not None else [_stage_of(arg) for arg in args]
        self._stages = _index_stages((stage, index) for index, stage in enumerate(stages))

    def stage(self, block_id: str) -> Stage:
        """Return the stage of a block; AssertionError if no stage has it."""
        return _find_stage(self._stages, block_id)[0]

    def _description(self) -> tuple[Any, ...]:
        return (type(self).__name__, self._auto_stage, _described(self._stages))

    def _parts(self) -> Sequence[Any]:
        if self._auto_stage is not None:
            return (self._auto_stage,)
        return tuple(dict.fromkeys(stage for stage, _ in self._stages.values()))

    def _placer(self) -> PlaceBlock:
        if self._auto_stage == AutoStage.SameAsIpu:
            return _same_as_ipu()
        if self._auto_stage == AutoStage.AutoIncrement:
            return _auto_increment()
        return self._listed

    def _listed(self, user_id: Any, ipu_id: int | None) -> BlockPlace:
        stage, index = _find_stage(self._stages, user_id)
        return BlockPlace(user_id, _choose(stage, ipu_id, default=index), stage=index)


class PipelinedExecution(ShardedExecution):
    """Stages run at the same time, each on its IPU and on another micro-batch.

    Takes the arguments of :class:`ShardedExecution`.
    """

    is_pipelined = True
    # The default of the class, because objects that older versions saved lack the attribute.
    _schedule: PipelineSchedule = "grouped"

    def setSchedule(self, schedule: PipelineSchedule) -> PipelinedExecution:
        """Set the order of forwards and backwards in the model of the device.

        The schedule changes memory and time, but no result. PopTorch has no such option; it is
        modelled on TensorFlow's PipelineSchedule.

        Args:
            schedule: ``grouped`` is PopTorch's pipeline and the default: in each cycle every IPU
                does a forward and a backward. With ``interleaved`` they take turns, so that a stage
                keeps activations of about half as many micro-batches, and each turn lasts as long
                as the slowest forward or backward in it.

        Raises:
            ValueError: the schedule is unknown.
        """
        if schedule not in get_args(PipelineSchedule):
            raise ValueError(f"setSchedule({schedule!r}): expected 'grouped' or 'interleaved'")
        self._schedule = schedule
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._schedule)


def _same_as_ipu() -> PlaceBlock:
    ipus: dict[Any, int] = {}

    def place(user_id: Any, ipu_id: int | None) -> BlockPlace:
        ipu = ipus.setdefault(user_id, ipu_id) if ipu_id is not None else ipus.get(user_id)
        assert ipu is not None, (
            f"no IPU was specified for block {user_id!r}: AutoStage.SameAsIpu needs an ipu_id "
            "for every block. Give one, or use AutoStage.AutoIncrement"
        )
        return BlockPlace(user_id, ipu, stage=ipu)

    return place


def _auto_increment() -> PlaceBlock:
    stages: dict[Any, BlockPlace] = {}
    numbers = count(1)  # PopTorch counts these from 1

    def place(user_id: Any, ipu_id: int | None) -> BlockPlace:
        if user_id not in stages:
            stage = next(numbers)
            stages[user_id] = BlockPlace(user_id, stage if ipu_id is None else ipu_id, stage)
        return stages[user_id]

    return place


class Phase:
    """Stages that run at the same time.

    Args:
        *arg: Stages, or ids of blocks that make one stage.

    Raises:
        AssertionError: Stages and ids mixed, or neither.
    """

    def __init__(self, *arg: Stage | str) -> None:
        if arg and all(isinstance(stage, Stage) for stage in arg):
            self._stages = [stage for stage in arg if isinstance(stage, Stage)]
        else:
            assert arg, "a Phase needs at least one poptorch.Stage or block id"
            assert all(isinstance(block, str) for block in arg), (
                f"a Phase takes either Stages or block ids, not both: got {arg}"
            )
            self._stages = [Stage(*(str(block) for block in arg))]

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self._stages))})"

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return self._stages

    def stage(self, index: int) -> Stage:
        """Return the stage at ``index``."""
        return self._stages[index]

    def ipus(self, *ipus: int) -> Phase:
        """Run the stages on these IPUs, one for each.

        Raises:
            AssertionError: another number of IPUs than of stages.
        """
        assert len(ipus) == len(self._stages), (
            f"the phase has {len(self._stages)} stages: expected as many IPUs, got {len(ipus)}"
        )
        for stage, ipu in zip(self._stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


def _phase_of(spec: Any) -> Phase:
    if isinstance(spec, Phase):
        return spec
    if isinstance(spec, (Stage, str)):
        return Phase(spec)
    assert isinstance(spec, Iterable), (
        f"expected a poptorch.Phase, Stages or block ids, got {type(spec).__name__}"
    )
    return Phase(*spec)


class _PhasedExecution(_IExecutionStrategy):
    """Phases run one after the other; tensors wait off the chip in between.

    Args:
        *phases: each a Phase, a list of Stages, a list of block ids or one of them.

    Raises:
        AssertionError: no phases, an AutoStage, or a block in two stages.
    """

    def __init__(self, *phases: Any) -> None:
        assert phases, f"{type(self).__name__} needs its phases: there is no AutoStage for it"
        assert not any(isinstance(phase, AutoStage) for phase in phases), (
            f"{type(self).__name__} takes phases: there is no AutoStage for it"
        )
        self._phases = [_phase_of(phase) for phase in phases]
        self._stages = _index_stages(
            (stage, (number, index))
            for number, phase in enumerate(self._phases)
            for index, stage in enumerate(phase.stages)
        )
        self._separate_backward_phase = False

    def phase(self, phase: int) -> Phase:
        """Return the phase with this number, counted from 0; AssertionError for others."""
        assert isinstance(phase, int), f"phases are numbered by integers, got {phase!r}"
        assert 0 <= phase < len(self._phases), (
            f"phase {phase} does not exist: phases are numbered from 0 to {len(self._phases) - 1}"
        )
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """Return the stage of a block; AssertionError if no stage has it."""
        return _find_stage(self._stages, block_id)[0]

    def useSeparateBackwardPhase(self, use: bool = True) -> _PhasedExecution:
        """Run the backward pass in phases of its own, also for the last forward phase."""
        self._separate_backward_phase = use
        return self

    def _description(self) -> tuple[Any, ...]:
        return (type(self).__name__, self._separate_backward_phase, _described(self._stages))

    def _parts(self) -> Sequence[Any]:
        return self._phases

    def _placer(self) -> PlaceBlock:
        return self._listed

    def _listed(self, user_id: Any, ipu_id: int | None) -> BlockPlace:
        stage, (phase, index) = _find_stage(self._stages, user_id)
        ipu = _choose(stage, ipu_id, default=self._default_ipu(phase, index))
        return BlockPlace(user_id, ipu, stage=index, phase=phase)

    @staticmethod
    def _default_ipu(phase: int, index: int) -> int:
        raise NotImplementedError


class SerialPhasedExecution(_PhasedExecution):
    """Phases that use the same IPUs one after the other; see the base class."""

    _liveness = Liveness.AlwaysLive

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Set when tensors are sent off the chip.

        Raises:
            AssertionError: not a :class:`Liveness`.
        """
        assert isinstance(liveness, Liveness), (
            f"expected a poptorch.Liveness, got {type(liveness).__name__}"
        )
        self._liveness = liveness
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._liveness)

    @staticmethod
    def _default_ipu(phase: int, index: int) -> int:  # noqa: ARG004
        return index


class ParallelPhasedExecution(_PhasedExecution):
    """Phases that take turns: even ones on even IPUs, odd ones on odd IPUs."""

    _off_chip_after_forward = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Send tensors off the chip after the forward pass."""
        self._off_chip_after_forward = off_chip
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._off_chip_after_forward)

    @staticmethod
    def _default_ipu(phase: int, index: int) -> int:
        return 2 * index + phase % 2
