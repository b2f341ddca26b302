"""Schedules, which give the action (such as "forward") of every IPU in each step of a call.

In one step of a schedule, an IPU performs one action, such as the forward pass of a stage. A
pipeline cycle consists of one or more steps of the schedule. In PopART's pipeline, which is called
"grouped" here, a pipeline cycle contains a forward pass and a backward pass of every stage. A
pipeline cycle may also contain the recomputation of activations. A schedule does not contain steps
in which all IPUs are idle. The module ``schedule`` does not depend on how long a step of the
schedule takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeAlias

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule_views import Action, Cell, grid, svg
from popdist_py.ipu.settings import Settings, Strategy

__all__ = ["Action", "Cell", "Schedule", "idle_share", "least_accumulation", "schedule"]

_WORK: Final = ("forward", "recompute", "backward")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of one call of a model, or the first steps of the schedule.

    ``print()`` shows a schedule as text, and a notebook shows it as a picture.

    Attributes:
        rows: For each IPU, a tuple with one cell (the IPU's action) per step of the schedule. A
            cell describes the action of the IPU.
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
        """The number of steps until all IPUs of the pipeline work, or None if some never do."""
        return None if (full := self.full_from) is None else self.cycles.index(full)


# For each IPU, its tasks (actions such as "forward") in execution order. A task is an action of an
# IPU (such as "forward") with the numbers of its micro-batch and its stage. The tasks of each IPU
# that all IPUs start together, such as the tasks of one pipeline cycle.
_Tasks: TypeAlias = dict[int, list[tuple[Action, int | None, int | None]]]
_TaskGroup: TypeAlias = Mapping[int, list[tuple[Action, int | None, int | None]]]


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
        raise ValueError(f"steps={steps!r}: expected a whole number from 0 on, or None for all")
    ipus = range(placement.num_ipus)
    rows: list[list[Cell]] = [[] for _ in ipus]
    cycles: list[int] = []
    for cycle, group in islice(_task_groups(placement, settings), steps):
        for index in range(max(map(len, group.values()), default=0)):
            cycles.append(cycle)
            for ipu in ipus:
                tasks = group.get(ipu, [])
                task = tasks[index] if index < len(tasks) else ("idle", None, None)
                rows[ipu].append(Cell(len(cycles), *task))
    return Schedule(tuple(tuple(row[:steps]) for row in rows), tuple(cycles[:steps]))


def idle_share(strategy: Strategy, stages: int, micro_batches: int) -> float:
    """Return a formula's share of time in which a pipeline's IPUs are idle (one stage per IPU).

    The formula for the idle share applies to runs without recomputation. The formula assumes that a
    forward pass and a backward pass of a stage take one step each. A pipeline of N stages needs ``M
    + N - 1`` forward steps for M micro-batches, and the same number of backward steps. With M
    micro-batches, an IPU works in M of the forward steps and in M of the backward steps, and is
    idle in all other steps. If the cycles of PopART's pipeline are counted instead of steps, the
    idle share is ``(2N - 2) / (M + 2N - 2)``, for N stages and M micro-batches.
    """
    if strategy in ("grouped", "interleaved"):
        return (stages - 1) / (micro_batches + stages - 1)
    return 1 - 1 / stages


def least_accumulation(stages: int, *, is_training: bool) -> int:
    """Return the fewest micro-batches that a pipeline accepts per weight update or call.

    A pipeline needs at least one micro-batch per stage. In training, the backward pass of each
    stage except the last stage counts as an additional stage.
    """
    return 2 * stages - 1 if is_training else stages


def _is_work(cells: Iterable[Cell]) -> bool:
    return any(cell.action in _WORK for cell in cells)


def _task_groups(placement: Placement, settings: Settings) -> Iterator[tuple[int, _TaskGroup]]:
    """Yield the tasks that all IPUs start together, with the number of their pipeline cycle."""
    window = settings.accumulation if settings.is_training else settings.device_iterations
    windows = settings.device_iterations if settings.is_training else 1
    cycle = 0
    for index in range(windows):
        first = index * window + 1
        for groups in _window(placement, settings, first, window):
            cycle += 1
            yield from ((cycle, group) for group in groups if group)
        if settings.is_training:
            cycle += 1
            if settings.replicas > 1:
                yield cycle, {ipu: [("exchange", None, None)] for ipu in set(placement.ipus)}
            yield cycle, {ipu: [("update", None, None)] for ipu in set(placement.ipus)}


def _window(
    placement: Placement, settings: Settings, first: int, count: int
) -> Iterator[list[_TaskGroup]]:
    """Yield the tasks (actions) of all IPUs in each pipeline cycle between two weight updates."""
    if settings.strategy == "grouped":
        return _grouped(placement, settings, first, count)
    if settings.strategy == "interleaved":
        return _interleaved(placement, settings, first, count)
    numbers = range(first, first + count)
    one = _phased if settings.is_phased else _one_by_one
    return chain.from_iterable(one(placement, settings, number) for number in numbers)


def _grouped(
    placement: Placement, settings: Settings, first: int, count: int
) -> Iterator[list[_TaskGroup]]:
    """Yield the tasks (actions) of all IPUs in each pipeline cycle of PopART's pipeline.

    Stage s runs the forward pass of micro-batch m in pipeline cycle m + s. Stage s runs the
    backward pass of micro-batch m 2 (N - 1 - s) pipeline cycles after the forward pass, where N is
    the number of stages. The last stage runs the forward pass and the backward pass of a
    micro-batch in the same pipeline cycle.
    """
    last = placement.num_stages - 1
    recomputing = settings.recomputing(placement)
    for cycle in range(count + (2 * last if settings.is_training else last)):
        forward: _Tasks = {}
        again: _Tasks = {}
        backward: _Tasks = {}
        for stage, ipu in enumerate(placement.ipus):
            if 0 <= (m := cycle - stage) < count:
                forward.setdefault(ipu, []).append(("forward", first + m, stage))
            if settings.is_training and 0 <= (m := cycle - 2 * last + stage) < count:
                if stage in recomputing:
                    again.setdefault(ipu, []).append(("recompute", first + m, stage))
                backward.setdefault(ipu, []).append(("backward", first + m, stage))
        yield [forward, again, backward]


def _interleaved(
    placement: Placement, settings: Settings, first: int, count: int
) -> Iterator[list[_TaskGroup]]:
    """Yield the tasks (actions) of all IPUs in each pipeline cycle of an interleaved pipeline.

    In an interleaved pipeline, every stage alternates between forward passes and backward passes.
    In an interleaved pipeline, when a stage runs a forward pass, the neighbouring stages run
    backward passes.
    """
    if not settings.is_training:
        yield from _grouped(placement, settings, first, count)
        return
    stages = placement.num_stages
    recomputing = settings.recomputing(placement)
    for cycle in range(2 * (count + stages - 1)):
        again: _Tasks = {}
        now: _Tasks = {}
        for stage, ipu in enumerate(placement.ipus):
            m, rest = divmod(cycle - stage, 2)
            if not rest and 0 <= m < count:
                now.setdefault(ipu, []).append(("forward", first + m, stage))
            m, rest = divmod(cycle - (2 * stages - 1 - stage), 2)
            if not rest and 0 <= m < count:
                if stage in recomputing:
                    again.setdefault(ipu, []).append(("recompute", first + m, stage))
                now.setdefault(ipu, []).append(("backward", first + m, stage))
        yield [again, now]


def _one_by_one(
    placement: Placement, settings: Settings, number: int
) -> Iterator[list[_TaskGroup]]:
    """Yield the IPUs' tasks (actions) for one micro-batch in runs without a pipeline.

    Without a pipeline, the stages of the model run one after the other.
    """
    for action, stage in _passage(placement, settings):
        yield [{placement.ipus[stage]: [(action, number, stage)]}]


def _phased(placement: Placement, settings: Settings, number: int) -> Iterator[list[_TaskGroup]]:
    """Yield the IPUs' tasks for one micro-batch if phases (parts of the model) run in turn.

    A phase (a part of the model) is loaded from Streaming Memory before it runs. In parallel phased
    execution, an IPU loads the next phase (part of the model) while another IPU computes.
    """
    loaded: int | None = None
    tasks = list(_passage(placement, settings))
    for index, (action, stage) in enumerate(tasks):
        ipu = placement.ipus[stage]
        if stage != loaded:
            yield [{ipu: [("exchange", number, stage)]}]
        group: _Tasks = {ipu: [(action, number, stage)]}
        loaded = stage
        if settings.strategy == "parallel phased" and index + 1 < len(tasks):
            following = tasks[index + 1][1]
            if placement.ipus[following] != ipu:
                group[placement.ipus[following]] = [("exchange", number, following)]
                loaded = following
        yield [group]


def _passage(placement: Placement, settings: Settings) -> Iterator[tuple[Action, int]]:
    recomputing = settings.recomputing(placement)
    for stage in range(placement.num_stages):
        yield "forward", stage
    if settings.is_training:
        for stage in reversed(range(placement.num_stages)):
            if stage in recomputing:
                yield "recompute", stage
            yield "backward", stage
