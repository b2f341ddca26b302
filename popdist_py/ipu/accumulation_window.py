"""The start and end of each IPU's work in a window (the time from one weight update to the next).

The module ``repeated_schedule`` computes the order of the IPUs' work, and the module
``stage_cycles`` computes the clock cycles of each stage. The function ``lay_out`` combines both
into the work of each IPU in each pipeline cycle. A pipeline cycle is a part of the schedule that
all IPUs begin at the same time. The slowest IPU determines the length of a pipeline cycle. No other
module adds up the clock cycles that the IPUs need for a schedule.

Equal pipeline cycles are computed once, so the number of micro-batches does not change the time
that the functions of this module take. Only ``Window.pieces`` returns all activities one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.repeated_schedule import RepeatedSchedule, Task, repeated_schedule
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.stage_cycles import CycleModel, StageCycles

__all__ = ["Piece", "Window", "lay_out", "window_length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One activity of one IPU, such as the forward pass of one micro-batch.

    Attributes:
        ipu: The number of the IPU that performs the activity.
        name: The kind of activity, which is "transfer" (inputs from the host), "forward",
            "recompute", "backward", "load" (from Streaming Memory), "reduce" (over the replicas) or
            "update".
        begin: The start of the activity, in clock cycles after the last weight update.
        end: The end of the activity, in clock cycles after the last weight update.
        micro_batch: The number of the micro-batch, counted from 1 after each weight update.
            ``micro_batch`` is None for activities that do not belong to a micro-batch, such as the
            weight update.
        stage: The number of the pipeline stage or execution phase. ``stage`` is None for activities
            that do not belong to a stage, such as the weight update.
    """

    ipu: int
    name: str
    begin: float
    end: float
    micro_batch: int | None = None
    stage: int | None = None


# The actions of a schedule during which an IPU counts as busy.
_COMPUTING: Final = ("forward", "recompute", "backward", "update")
# The parts (such as "load" and "forward") of one task of an IPU in execution order. Each part is a
# pair of its name and its clock cycles.
_Parts: TypeAlias = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The work of all IPUs from one weight update to the next.

    For inference, which has no weight updates, the accumulation window is the whole call of the
    model.

    Attributes:
        length: The clock cycles from one weight update to the next, with copies and
            synchronisations between IPUs.
        busy: The clock cycles that each IPU spends on computing.
        count: The number of weight updates in one call of the model; 1 for inference. A call of the
            model also includes work of the host, which is not part of the window.
        schedule: The tasks (such as forward passes) that the IPUs perform in each pipeline cycle.
        parts: For each task in ``schedule.tasks``, the pairs of name and clock cycles that the task
            consists of.
        scale: The number that multiplies the clock cycles of all tasks so that they fill the whole
            window. The attribute ``length`` includes copies and synchronisations between IPUs,
            which no task includes.
        begins: The start of each repetition of pipeline cycles and the end of the last one, in
            clock cycles after the last weight update.
        offsets: For each repetition, the start of each of its pipeline cycles, and the end of the
            last one. The offsets are clock cycles after the start of the first of these cycles.
    """

    length: float
    busy: tuple[float, ...]
    count: int
    schedule: RepeatedSchedule
    parts: tuple[_Parts, ...]
    scale: float
    begins: tuple[float, ...]
    offsets: tuple[tuple[float, ...], ...]

    @property
    def cycles(self) -> int:
        """The time from one weight update to the next, in whole clock cycles."""
        return round(self.length)

    @property
    def num_pieces(self) -> int:
        """The number of activities that ``pieces`` returns."""
        return sum(
            self.schedule.times_of(task) * sum(1 for _, work in parts if work)
            for task, parts in zip(self.schedule.tasks, self.parts, strict=True)
        )

    def forward_begins(self, stage: int) -> Callable[[int], float]:
        """Return a function for the start of the pipeline cycle with a stage's forward pass.

        The argument of the returned function is the number of a micro-batch, counted from 1. The
        returned function gives clock cycles after the last weight update.

        Args:
            stage: The number of the pipeline stage or execution phase.
        """
        made = self.schedule
        task = next(t for t in made.tasks if (t.action, t.stage) == ("forward", stage))
        firsts = [one.first for one in made.repetitions]

        def begin(micro_batch: int) -> float:
            cycle = task.cycle + (micro_batch - 1) * made.every
            number = bisect_right(firsts, cycle) - 1
            size = len(made.repetitions[number].cycles)
            return self._begin(number, *divmod(cycle - firsts[number], size))

        return begin

    def pieces(self) -> tuple[Piece, ...]:
        """Return the IPUs' activities between two weight updates, sorted by IPU and then by time.

        In each pipeline cycle, an IPU performs its activities one after the other. An IPU that has
        finished its activities waits until the slowest IPU ends the same pipeline cycle. Activities
        of one IPU do not overlap in time.
        """
        return tuple(self._pieces(range))

    def outermost_pieces(self) -> tuple[Piece, ...]:
        """Return the activities in the first and the last time of each repetition of cycles.

        The returned activities have the order of ``pieces``. Among the returned activities are the
        first and the last activity of each IPU and each stage. The number of returned activities
        does not depend on the number of micro-batches.
        """
        return tuple(self._pieces(lambda times: sorted({0, times - 1})))

    def _pieces(self, shown: Callable[[int], Iterable[int]]) -> Iterator[Piece]:
        """Yield the IPUs' activities, where ``shown`` selects the times of each repetition."""
        for ipu in range(len(self.busy)):
            for number, repetition in enumerate(self.schedule.repetitions):
                for time in shown(repetition.times):
                    for index, cycle in enumerate(repetition.cycles):
                        pattern = self.schedule.patterns[cycle[ipu]]
                        yield from self._in_cycle(pattern, number, time, index)

    def _in_cycle(
        self, pattern: Sequence[int], number: int, time: int, index: int
    ) -> Iterator[Piece]:
        """Yield the activities of one IPU in one pipeline cycle.

        Args:
            pattern: The indexes of the IPU's tasks in the pipeline cycle.
            number: The number of the repetition that contains the pipeline cycle.
            time: The number of times that the cycles of the repetition ran before.
            index: The index of the pipeline cycle in the cycles of the repetition.
        """
        repetition = self.schedule.repetitions[number]
        cycle = repetition.first + time * len(repetition.cycles) + index
        now = self._begin(number, time, index)
        # Rounding errors must not move the end of an activity past the end of its pipeline cycle.
        latest = max(now, min(self._end(number, time, index), self.cycles))
        for task in pattern:
            about = self.schedule.tasks[task]
            micro_batch = self.schedule.micro_batch(about, cycle)
            for name, work in self.parts[task]:
                if work:
                    end = min(now + self.scale * work, latest)
                    yield Piece(about.ipu, name, now, end, micro_batch, about.stage)
                    now = end

    def _begin(self, number: int, time: int, index: int) -> float:
        offsets = self.offsets[number]
        return self.begins[number] + time * offsets[-1] + offsets[index]

    def _end(self, number: int, time: int, index: int) -> float:
        repetition = self.schedule.repetitions[number]
        if index + 1 < len(repetition.cycles):
            return self._begin(number, time, index + 1)
        if time + 1 < repetition.times:
            return self._begin(number, time + 1, 0)
        return self.begins[number + 1]


def lay_out(
    stages: Sequence[StageCycles], placement: Placement, settings: Settings, model: CycleModel
) -> Window:
    """Return the work of all IPUs from one weight update to the next.

    With overlapped I/O, I/O tiles (tiles that only transfer data) load the inputs while the other
    tiles compute. With overlapped I/O, the length of a pipeline cycle is the longer of two times:
    the loading time of the I/O tiles and the computing time of the other tiles.

    Args:
        stages: The clock cycles that each stage of the model needs.
        placement: The stage of each operation, and the IPU of each stage.
        settings: The options of the run, such as the number of replicas.
        model: The constants for estimating clock cycles, such as the share of the peak rate that
            matrix products reach.
    """
    made = repeated_schedule(placement, settings)
    parts = _parts_of_tasks(made.tasks, stages, placement, settings)
    lengths = _cycle_lengths(made, parts, stages, settings)
    work = _repeated_sum(made, map(sum, lengths))
    length = work + _between_ipus(made, stages, placement, settings, model)
    scale = round(length) / (work or 1)
    offsets = [tuple(scale * done for done in accumulate(one, initial=0.0)) for one in lengths]
    durations = [o.times * one[-1] for o, one in zip(made.repetitions, offsets, strict=True)]
    busy = [0.0] * placement.num_ipus
    for task, own in zip(made.tasks, parts, strict=True):
        if task.action in _COMPUTING:
            busy[task.ipu] += made.times_of(task) * sum(work for _, work in own)
    return Window(
        length=length,
        busy=tuple(busy),
        count=settings.device_iterations if settings.is_training else 1,
        schedule=made,
        parts=tuple(parts),
        scale=scale,
        begins=tuple(accumulate(durations, initial=0.0)),
        offsets=tuple(offsets),
    )


def window_length(
    stages: Sequence[StageCycles], placement: Placement, settings: Settings, model: CycleModel
) -> float:
    """Return the clock cycles from one weight update to the next, as ``Window.length``.

    The function takes well below a millisecond for a few stages, so that a search can call it for
    thousands of divisions of a model into stages.

    Args:
        stages: The clock cycles that each stage of the model needs.
        placement: The IPU of each stage. The function does not use the stages of the operations.
        settings: The options of the run, such as the number of replicas.
        model: The constants for estimating clock cycles.
    """
    made = repeated_schedule(placement, settings)
    parts = _parts_of_tasks(made.tasks, stages, placement, settings)
    lengths = _cycle_lengths(made, parts, stages, settings)
    work = _repeated_sum(made, map(sum, lengths))
    return work + _between_ipus(made, stages, placement, settings, model)


def _repeated_sum(made: RepeatedSchedule, lengths: Iterable[float]) -> float:
    """Return the sum of the lengths of all pipeline cycles, from one length for each repetition."""
    return sum(one.times * length for one, length in zip(made.repetitions, lengths, strict=True))


def _cycle_lengths(
    made: RepeatedSchedule,
    parts: Sequence[_Parts],
    stages: Sequence[StageCycles],
    settings: Settings,
) -> list[list[float]]:
    """Return, for each repetition, the clock cycles of its pipeline cycles.

    The returned clock cycles do not include copies and synchronisations between IPUs.
    """
    work = [sum(work for _, work in own) for own in parts]
    patterns = [sum(work[task] for task in pattern) for pattern in made.patterns]
    if settings.overlaps_io:
        arriving = [
            stages[task.stage].receive
            if task.action == "forward" and task.stage is not None
            else 0.0
            for task in made.tasks
        ]
        loading = [sum(arriving[task] for task in pattern) for pattern in made.patterns]
        patterns = list(map(max, patterns, loading))
    return [
        [max(map(patterns.__getitem__, cycle)) for cycle in repetition.cycles]
        for repetition in made.repetitions
    ]


def _parts_of_tasks(
    tasks: Sequence[Task],
    stages: Sequence[StageCycles],
    placement: Placement,
    settings: Settings,
) -> list[_Parts]:
    """Return the parts of each task in execution order, as pairs of name and clock cycles.

    If I/O tiles load the inputs of the model, the part "transfer" of a task has 0 clock cycles,
    because the other tiles compute at the same time.
    """
    own: list[list[StageCycles]] = [[] for _ in range(placement.num_ipus)]
    for stage, ipu in zip(stages, placement.ipus, strict=True):
        own[ipu].append(stage)
    return [_parts(task, stages, own[task.ipu], settings) for task in tasks]


def _parts(
    task: Task, stages: Sequence[StageCycles], own: Sequence[StageCycles], settings: Settings
) -> _Parts:
    """Return the parts of a task, where ``own`` are the stages that run on the task's IPU."""
    if task.action == "update":
        return (("update", sum(s.update for s in own)),)
    if task.stage is None:
        return (("reduce", sum(s.all_reduce for s in own)),)
    here = stages[task.stage]
    if task.action == "forward":
        transfer = 0.0 if settings.overlaps_io else here.receive
        return (("transfer", transfer), ("load", here.offload), ("forward", here.forward))
    if task.action == "recompute":
        return (("recompute", here.recompute),)
    return (("backward", here.backward),) if task.action == "backward" else (("load", here.load),)


def _between_ipus(
    made: RepeatedSchedule,
    stages: Sequence[StageCycles],
    placement: Placement,
    settings: Settings,
    model: CycleModel,
) -> float:
    """Return the clock cycles for copies and synchronisations between IPUs in a window.

    In a pipeline, all pairs of IPUs copy at the same time, once in each pipeline cycle. All IPUs
    synchronise at the end of each pipeline cycle.
    """
    synchronising = made.num_cycles * model.sync_cycles * (placement.num_ipus > 1)
    if settings.is_phased:
        return synchronising  # Execution phases exchange data through DRAM outside the IPU.
    there = [stage.copy for stage in stages]
    back = [stage.copy_gradients for stage in stages]
    if settings.is_pipelined:
        return made.num_cycles * (max(there) + max(back)) + synchronising
    return made.micro_batches * sum([*there, *back]) + synchronising
