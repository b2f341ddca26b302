"""Execution strategies, which assign each block of a model's operations to a stage and an IPU.

An execution strategy contains stages or phases, which are groups of blocks. The method ``_placer``
of an execution strategy returns a function, which takes a block id and returns the block's IPU,
stage and phase. The module ``tracing.block_recorder`` calls the function of ``_placer`` for each
block of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

from popdist_py.errors import counted
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
    """A stage, which contains blocks of operations that run one after the other on one IPU.

    Args:
        *block_ids: The ids of the blocks in the stage.

    Raises:
        AssertionError: A block id is not a string.
    """

    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(block, str) for block in block_ids), (
            f"The ids of blocks in a poptorch.Stage must be strings, got {block_ids}"
        )
        self._blocks = list(block_ids)
        self._ipu_id: int | None = None

    @property
    def blocks(self) -> list[str]:
        """The ids of the stage's blocks."""
        return self._blocks

    def ipu(self, ipu_id: int) -> Stage:
        """Run this stage on the given IPU, even if the ``ipu_id`` of its blocks differs."""
        self._ipu_id = ipu_id
        return self

    def __repr__(self) -> str:
        ipu = "" if self._ipu_id is None else f".ipu({self._ipu_id})"
        return f"Stage({', '.join(map(repr, self._blocks))}){ipu}"


class _IExecutionStrategy:
    """The base class of the execution strategies, which assign blocks to stages and IPUs."""

    is_pipelined = False

    def _placer(self) -> PlaceBlock:
        raise NotImplementedError(
            f"The execution strategy {type(self).__name__} does not assign blocks to IPUs"
        )

    def _description(self) -> tuple[Any, ...]:
        """Return all settings of this execution strategy as a tuple, to compare strategies.

        Two execution strategies with the same settings return equal tuples.
        """
        raise NotImplementedError(
            f"The execution strategy {type(self).__name__} does not define _description()"
        )

    def stage(self, block_id: str) -> Stage:
        """Return the stage that contains the block ``block_id``.

        Raises:
            AssertionError: No stage of the execution strategy contains the block.
        """
        raise NotImplementedError(f"The execution strategy {type(self).__name__} has no stages")

    def _parts(self) -> Sequence[Any]:
        """Return the stages or phases of the execution strategy, for the text of ``repr()``."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._parts()))})"


def _stage_of(spec: Any) -> Stage:
    """Return a ``Stage``, made from a block id or a list of block ids if necessary."""
    if isinstance(spec, Stage):
        return spec
    if isinstance(spec, str):
        return Stage(spec)
    assert isinstance(spec, Iterable), (
        "A stage must be a poptorch.Stage, a block id or a list of block ids, got "
        f"{type(spec).__name__}"
    )
    return Stage(*spec)


def _index_stages(stages: Iterable[tuple[Stage, Any]]) -> dict[str, tuple[Stage, Any]]:
    """Return a dictionary from each block id to the block's stage and the stage's position.

    Raises:
        AssertionError: Two stages contain the same block.
    """
    by_block: dict[str, tuple[Stage, Any]] = {}
    for stage, position in stages:
        for block in stage.blocks:
            assert block not in by_block, (
                f"The block {block} is associated with more than one stage: name each block in "
                "one stage only"
            )
            by_block[block] = (stage, position)
    return by_block


def _find_stage(by_block: dict[str, tuple[Stage, Any]], block_id: Any) -> tuple[Stage, Any]:
    assert block_id in by_block, (
        f"Unknown Block {block_id!r}: the execution strategy has the blocks {sorted(by_block)}"
    )
    return by_block[block_id]


def _described(by_block: dict[str, tuple[Stage, Any]]) -> list[tuple[Any, ...]]:
    return [(block, stage._ipu_id, place) for block, (stage, place) in sorted(by_block.items())]


def _choose(stage: Stage, ipu_id: int | None, default: int) -> int:
    """Return the index of the IPU that runs a block of a stage.

    An IPU that the program set for the stage overrides an IPU that the program set for the block.
    The IPU ``default`` is returned only if the program set neither the stage's IPU nor the block's
    IPU.
    """
    if stage._ipu_id is not None:
        return stage._ipu_id
    return default if ipu_id is None else ipu_id


class ShardedExecution(_IExecutionStrategy):
    """An execution strategy: the stages of a model run in turn, each on a different IPU.

    Args:
        *args: Either one :class:`AutoStage` or the stages in order. Each given stage is a
            ``Stage``, a block id or a list of block ids. The default is ``AutoStage.SameAsIpu``,
            which makes one stage for each IPU.

    Raises:
        AssertionError: Two stages contain the same block, or an AutoStage is combined with other
            arguments.
    """

    def __init__(self, *args: Any) -> None:
        automatic = [arg for arg in args if isinstance(arg, AutoStage)]
        assert not automatic or len(args) == 1, (
            f"An execution strategy with an AutoStage cannot have other arguments, got {args}"
        )
        self._auto_stage = automatic[0] if automatic else AutoStage.SameAsIpu if not args else None
        stages = [] if self._auto_stage is not None else [_stage_of(arg) for arg in args]
        self._stages = _index_stages((stage, index) for index, stage in enumerate(stages))

    def stage(self, block_id: str) -> Stage:
        """Return the stage that contains the block ``block_id``.

        Raises:
            AssertionError: No stage of the execution strategy contains the block.
        """
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
    """An execution strategy: the stages work at the same time, on different micro-batches.

    The constructor of ``PipelinedExecution`` has the same arguments as :class:`ShardedExecution`.
    """

    is_pipelined = True
    # The default schedule is a class attribute, because strategies that older versions of this
    # library pickled do not have the instance attribute.
    _schedule: PipelineSchedule = "grouped"

    def setSchedule(self, schedule: PipelineSchedule) -> PipelinedExecution:
        """Set the order of forward and backward passes for the emulated memory and time.

        The order of the passes changes the emulated memory and time, but not the results.
        ``setSchedule`` corresponds to the option ``PipelineSchedule`` of TensorFlow for the IPU.
        Graphcore's PopTorch does not have the method ``setSchedule``.

        Args:
            schedule: The default, ``grouped``, is PopTorch's order, with a forward and a backward
                pass on every IPU in each pipeline cycle. With the schedule ``interleaved``, an IPU
                runs either a forward or a backward pass in each pipeline cycle. A pipeline cycle
                lasts as long as its slowest forward or backward pass. With the schedule
                ``interleaved``, a stage keeps the activations of about half as many micro-batches
                as with ``grouped``.

        Raises:
            ValueError: ``schedule`` is neither ``grouped`` nor ``interleaved``.
        """
        if schedule not in get_args(PipelineSchedule):
            raise ValueError(
                f"setSchedule({schedule!r}) names an unknown schedule: expected 'grouped' or "
                "'interleaved'"
            )
        self._schedule = schedule
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._schedule)


def _same_as_ipu() -> PlaceBlock:
    ipus: dict[Any, int] = {}

    def place(user_id: Any, ipu_id: int | None) -> BlockPlace:
        ipu = ipus.setdefault(user_id, ipu_id) if ipu_id is not None else ipus.get(user_id)
        assert ipu is not None, (
            f"no IPU was specified for block {user_id!r}, but AutoStage.SameAsIpu needs an ipu_id "
            "for every block. Give the block an ipu_id, or use AutoStage.AutoIncrement"
        )
        return BlockPlace(user_id, ipu, stage=ipu)

    return place


def _auto_increment() -> PlaceBlock:
    stages: dict[Any, BlockPlace] = {}
    # PopTorch numbers the stages that it makes automatically from 1.
    numbers = count(1)

    def place(user_id: Any, ipu_id: int | None) -> BlockPlace:
        if user_id not in stages:
            stage = next(numbers)
            stages[user_id] = BlockPlace(user_id, stage if ipu_id is None else ipu_id, stage)
        return stages[user_id]

    return place


class Phase:
    """A part of a model whose stages run at the same time, for a phased execution strategy.

    Args:
        *arg: Either the stages of the phase, or the block ids of the phase's only stage.

    Raises:
        AssertionError: No arguments are given, or the arguments contain both stages and block ids.
    """

    def __init__(self, *arg: Stage | str) -> None:
        if arg and all(isinstance(stage, Stage) for stage in arg):
            self._stages = [stage for stage in arg if isinstance(stage, Stage)]
        else:
            assert arg, "A poptorch.Phase needs at least one poptorch.Stage or block id"
            assert all(isinstance(block, str) for block in arg), (
                f"A poptorch.Phase accepts either Stages or block ids, not both: got {arg}"
            )
            self._stages = [Stage(*(str(block) for block in arg))]

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self._stages))})"

    @property
    def stages(self) -> list[Stage]:
        """The stages of the phase, in order."""
        return self._stages

    def stage(self, index: int) -> Stage:
        """Return the stage at the position ``index`` in the phase."""
        return self._stages[index]

    def ipus(self, *ipus: int) -> Phase:
        """Set the IPU of each stage of the phase.

        Raises:
            AssertionError: The number of given IPUs differs from the number of stages in the phase.
        """
        assert len(ipus) == len(self._stages), (
            f"The phase has {counted(len(self._stages), 'stage')}, but Phase.ipus() got "
            f"{counted(len(ipus), 'IPU')}: give one IPU for each stage"
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
        f"A phase must be a poptorch.Phase, Stages or block ids, got {type(spec).__name__}"
    )
    return Phase(*spec)


class _PhasedExecution(_IExecutionStrategy):
    """The base class of phased strategies, whose phases (parts of the model) run in turn.

    Between two phases, an IPU stores tensors in memory outside the IPU (Streaming Memory).

    Args:
        *phases: The phases of the model in order. Each argument is a ``Phase``, a ``Stage``, a
            block id, a list of stages or a list of block ids.

    Raises:
        AssertionError: No phase is given, an argument is an ``AutoStage``, or two stages contain
            the same block.
    """

    _separate_backward_phase = False

    def __init__(self, *phases: Any) -> None:
        assert phases, (
            f"{type(self).__name__} needs its phases as arguments, because it does not support "
            "AutoStage"
        )
        assert not any(isinstance(phase, AutoStage) for phase in phases), (
            f"{type(self).__name__} does not support AutoStage: give its phases as arguments"
        )
        self._phases = [_phase_of(phase) for phase in phases]
        self._stages = _index_stages(
            (stage, (number, index))
            for number, phase in enumerate(self._phases)
            for index, stage in enumerate(phase.stages)
        )

    def phase(self, phase: int) -> Phase:
        """Return a phase of the execution strategy by its number, counted from 0.

        Raises:
            AssertionError: The execution strategy does not have a phase with the number ``phase``.
        """
        assert isinstance(phase, int), f"The number of a phase must be an integer, got {phase!r}"
        assert 0 <= phase < len(self._phases), (
            f"The phase {phase} does not exist: phases are numbered from 0 to "
            f"{len(self._phases) - 1}"
        )
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """Return the stage that contains the block ``block_id``.

        Raises:
            AssertionError: No stage of the execution strategy contains the block.
        """
        return _find_stage(self._stages, block_id)[0]

    def useSeparateBackwardPhase(self, use: bool = True) -> _PhasedExecution:
        """Run the backward pass in phases (loaded parts) that are separate from the forward phases.

        The emulation stores the setting ``useSeparateBackwardPhase`` but ignores it.
        """
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
    """An execution strategy: all phases (parts of the model) run in turn on the same IPUs.

    The constructor of ``SerialPhasedExecution`` takes the phases in order. Each given phase is a
    ``Phase``, a ``Stage``, a block id, a list of stages or a list of block ids.
    """

    _liveness = Liveness.AlwaysLive

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Set whether tensors stay in the IPU's memory between phases (parts of the model).

        The emulation stores the setting ``setTensorsLiveness`` but ignores it.

        Raises:
            AssertionError: ``liveness`` is not a :class:`Liveness`.
        """
        assert isinstance(liveness, Liveness), (
            f"setTensorsLiveness() needs a poptorch.Liveness, got {type(liveness).__name__}"
        )
        self._liveness = liveness
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._liveness)

    @staticmethod
    def _default_ipu(phase: int, index: int) -> int:  # noqa: ARG004
        return index


class ParallelPhasedExecution(_PhasedExecution):
    """An execution strategy whose phases (parts of the model) alternate between two IPU sets.

    Phases (parts of the model) with even numbers run on the IPUs with even numbers. Phases (parts
    of the model) with odd numbers run on the IPUs with odd numbers. The constructor of
    ``ParallelPhasedExecution`` takes the phases in order. Each given phase is a ``Phase``, a
    ``Stage``, a block id, a list of stages or a list of block ids.
    """

    _off_chip_after_forward = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Move tensors out of the IPU's memory after the forward pass.

        The emulation stores the setting ``sendTensorsOffChipAfterFwd`` but ignores it.
        """
        self._off_chip_after_forward = off_chip
        return self

    def _description(self) -> tuple[Any, ...]:
        return (*super()._description(), self._off_chip_after_forward)

    @staticmethod
    def _default_ipu(phase: int, index: int) -> int:
        return 2 * index + phase % 2
