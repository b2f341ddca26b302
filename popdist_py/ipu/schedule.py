"""Schedules, which give the action (such as "forward") of every IPU in each step of a call.

In one step of a schedule, an IPU performs one action, such as the forward pass of a stage. A
pipeline cycle consists of one or more steps of the schedule. In PopART's pipeline, which is called
"grouped" here, a pipeline cycle contains a forward pass and a backward pass of every stage. A
pipeline cycle may also contain the recomputation of activations. A schedule does not contain steps
in which all IPUs are idle. The module ``schedule`` does not depend on how long a step of the
schedule takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.repeated_schedule import RepeatedSchedule, Task, repeated_schedule
from popdist_py.ipu.schedule_views import Action, Cell, grid, svg
from popdist_py.ipu.settings import Settings, Strategy

__all__ = [
    "Action",
    "Cell",
    "Schedule",
    "idle_share",
    "least_accumulation",
    "schedule",
    "window_idle_share",
]

_WORK: Final = ("forward", "recompute", "backward")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of one call of a model, or the first steps of the schedule.

    ``print()`` shows a schedule as text, and a notebook shows it as a picture.

    Attributes:
        rows: For each IPU, a tuple with one cell (the IPU's action) per step of the schedule.
        cycles: For each step of the schedule, the number of its pipeline cycle, counted from 1.
    """

    rows: tuple[tuple[Cell, ...], ...]
    cycles: tuple[int, ...]

    def __str__(self) -> str:
        return grid(self).rstrip("\n")

    def svg(self) -> str:
        """Return a picture of the schedule as SVG."""
        return svg(self)

    def _repr_html_(self) -> str:
        return svg(self)

    @property
    def idle_share(self) -> float:
        """The mean share of IPUs that are idle in a step of the schedule that contains computation.

        Steps of the schedule in which the IPUs only exchange data or update weights are not
        counted.
        """
        steps = [cells for cells in zip(*self.rows, strict=True) if _is_work(cells)]
        idle = sum(cell.action == "idle" for cells in steps for cell in cells)
        return idle / (len(steps) * len(self.rows)) if steps else 0.0

    @property
    def full_from(self) -> int | None:
        """The number of the first pipeline cycle without idle IPUs, when the pipeline is full.

        ``full_from`` is None if an IPU is idle in every pipeline cycle. An IPU that waits only
        while other IPUs recompute activations does not count as idle.
        """
        work: set[int] = set()
        waiting: set[int] = set()
        for cycle, cells in zip(self.cycles, zip(*self.rows, strict=True), strict=True):
            actions = {cell.action for cell in cells}
            if actions & {"forward", "backward"}:
                work.add(cycle)
                if "idle" in actions:
                    waiting.add(cycle)
        return min(work - waiting, default=None)

    @property
    def steps_until_full(self) -> int | None:
        """The number of steps until all IPUs work in the same cycle, or None if they never do."""
        return None if (full := self.full_from) is None else self.cycles.index(full)


def schedule(placement: Placement, settings: Settings, *, steps: int | None = None) -> Schedule:
    """Return the schedule of all IPUs of a replica for one call of the model.

    Args:
        placement: The stage of each operation, and the IPU of each stage. In phased execution, each
            stage is a phase (a part of the model that is loaded, run and removed again).
        settings: The options of the run, such as the execution strategy.
        steps: The largest number of steps in the returned schedule. None returns all steps.

    Raises:
        ValueError: ``steps`` is negative or not an integer.
    """
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise ValueError(
            f"steps={steps!r}: expected an integer of at least 0, or None for all steps"
        )
    windows = settings.device_iterations if settings.is_training else 1
    rows: list[list[Cell]] = [[] for _ in range(placement.num_ipus)]
    cycles: list[int] = []
    for cycle, cells in islice(_columns(repeated_schedule(placement, settings), windows), steps):
        cycles.append(cycle)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return Schedule(tuple(map(tuple, rows)), tuple(cycles))


def idle_share(strategy: Strategy, stages: int, micro_batches: int) -> float:
    """Return a formula's share of time in which a pipeline's IPUs are idle (one stage per IPU).

    The formula for the idle share applies to runs without recomputation. The formula assumes that a
    forward pass and a backward pass of a stage take one step each. A pipeline of N stages needs ``M
    + N - 1`` forward steps for M micro-batches, and the same number of backward steps. An IPU works
    in M of the forward steps and in M of the backward steps. If the cycles of PopART's pipeline are
    counted instead of steps, the idle share is ``(2N - 2) / (M + 2N - 2)``.
    """
    if strategy in ("grouped", "interleaved"):
        return (stages - 1) / (micro_batches + stages - 1)
    return 1 - 1 / stages


def window_idle_share(placement: Placement, settings: Settings) -> float:
    """Return the mean share of IPUs that are idle in a step between two weight updates.

    The returned number is equal to ``Schedule.idle_share`` of all steps from one weight update to
    the next. The function does not make these steps, so the number of micro-batches does not change
    the time that the function takes.
    """
    made = repeated_schedule(placement, settings)
    idle, total = 0, 0
    for repetition in made.repetitions:
        for step in (step for cycle in repetition.cycles for step in made.steps(cycle)):
            if any(task is not None and task.action in _WORK for task in step):
                idle += repetition.times * step.count(None)
                total += repetition.times * len(step)
    return idle / total if total else 0.0


def least_accumulation(stages: int, *, is_training: bool) -> int:
    """Return the fewest micro-batches that a pipeline accepts per weight update or call.

    A pipeline needs at least one micro-batch per stage. In training, the backward pass of each
    stage except the last stage counts as an additional stage.
    """
    return 2 * stages - 1 if is_training else stages


def _is_work(cells: Iterable[Cell]) -> bool:
    return any(cell.action in _WORK for cell in cells)


def _columns(made: RepeatedSchedule, windows: int) -> Iterator[tuple[int, list[Cell]]]:
    """Yield the number of the pipeline cycle and the IPUs' actions of each step of a call.

    Args:
        made: The schedule from one weight update to the next.
        windows: The number of weight updates in the call; 1 for inference.
    """
    step = 0
    num_cycles = made.num_cycles
    for window in range(windows):
        before = window * made.micro_batches
        for repetition in made.repetitions:
            period = [made.steps(cycle) for cycle in repetition.cycles]
            for time in range(repetition.times):
                first = repetition.first + time * len(period)
                for cycle, steps in enumerate(period, first):
                    for tasks in steps:
                        step += 1
                        cells = [_cell(made, task, step, cycle, before) for task in tasks]
                        yield window * num_cycles + cycle + 1, cells


def _cell(made: RepeatedSchedule, task: Task | None, step: int, cycle: int, before: int) -> Cell:
    """Return the action of an IPU, where ``before`` is the number of earlier micro-batches."""
    if task is None:
        return Cell(step)
    number = made.micro_batch(task, cycle)
    return Cell(step, task.action, None if number is None else before + number, task.stage)
