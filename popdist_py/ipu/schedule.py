"""Schedules, which contain the action of every IPU in each step of a run.

In one step, an IPU performs one action. A pipeline cycle consists of one or more steps. In PopART's
pipeline ("grouped"), a pipeline cycle contains a forward pass and a backward pass of every stage. A
pipeline cycle may also contain a recomputation. Steps without any action are left out. This module
does not depend on the duration of steps.
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
    """The schedule of a run or of its first steps.

    ``print()`` shows a schedule as text, and a notebook shows it as a picture.

    Attributes:
        rows: For each IPU, a tuple with one cell per step.
        cycles: For each step, the number of its pipeline cycle, counted from 1.
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
        """The share of idle cells, in the steps that contain computation.

        Steps that only exchange data or update weights do not count.
        """
        steps = [cells for cells in zip(*self.rows, strict=True) if _is_work(cells)]
        idle = sum(cell.action == "idle" for cells in steps for cell in cells)
        return idle / (len(steps) * len(self.rows)) if steps else 0.0

    @property
    def full_from(self) -> int | None:
        """The number of the first pipeline cycle without waiting IPUs; None if IPUs always wait.

        An IPU that waits only while other IPUs recompute does not count as waiting.
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
        """The number of steps before the cycle ``full_from``, or None without that cycle."""
        return None if (full := self.full_from) is None else self.cycles.index(full)


# The tasks of each IPU, in execution order. All IPUs start the tasks of a group at the same time. A
# task is an action with the numbers of its micro-batch and its stage.
_Tasks: TypeAlias = dict[int, list[tuple[Action, int | None, int | None]]]
_TaskGroup: TypeAlias = Mapping[int, list[tuple[Action, int | None, int | None]]]


def schedule(placement: Placement, settings: Settings, *, steps: int | None = None) -> Schedule:
    """Return the schedule of all IPUs of a replica for one call.

    Args:
        placement: The stages and their IPUs. In phased execution, the stages are the phases.
        settings: The settings of the run.
        steps: The largest number of steps to return. None returns all steps.

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
    """Return the idle share of a run with one IPU per stage and without recomputation.

    The share is computed by a formula. Forward pass and backward pass take one step each. A
    pipeline of N stages runs M micro-batches in ``M + N - 1`` forward steps and as many backward
    steps. An IPU works in M steps of each kind. If the cycles of PopART's pipeline are counted
    instead of steps, the idle share is ``(2N - 2) / (M + 2N - 2)``.
    """
    if strategy in ("grouped", "interleaved"):
        return (stages - 1) / (micro_batches + stages - 1)
    return 1 - 1 / stages


def least_accumulation(stages: int, *, is_training: bool) -> int:
    """Return the smallest number of micro-batches that a pipeline accepts.

    A pipeline needs one micro-batch per stage. In training, the backward passes of all stages
    except the last stage count as additional stages.
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
    """Yield the tasks of each pipeline cycle between two weight updates."""
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
    """Yield the tasks of each cycle of PopART's pipeline.

    Stage s runs the forward pass of micro-batch m in cycle m + s. The stage runs the backward pass
    2 (N - 1 - s) cycles later, where N is the number of stages. On the last stage, forward pass and
    backward pass are in the same cycle.
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
    """Yield the tasks of each cycle of an interleaved pipeline.

    Every stage alternates between forward passes and backward passes. When a stage runs forward
    passes, the stages before and after it run backward passes.
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
    """Yield the tasks of one micro-batch, which passes through the stages one after the other."""
    for action, stage in _passage(placement, settings):
        yield [{placement.ipus[stage]: [(action, number, stage)]}]


def _phased(placement: Placement, settings: Settings, number: int) -> Iterator[list[_TaskGroup]]:
    """Yield the tasks of one micro-batch in phased execution.

    A phase is loaded before it runs. In parallel phased execution, an IPU loads the next phase
    while another IPU computes.
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
