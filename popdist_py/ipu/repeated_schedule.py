"""The schedule between two weight updates, as pipeline cycles that repeat for each micro-batch.

Each IPU performs the same tasks for every micro-batch, always the same number of pipeline cycles
after the tasks of the previous micro-batch. The first and the last pipeline cycles between two
weight updates lack some of these tasks. The number of different pipeline cycles therefore depends
on the number of stages, and not on the number of micro-batches. The module ``repeated_schedule``
does not depend on how long a pipeline cycle takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule_views import Action
from popdist_py.ipu.settings import Settings, Strategy

__all__ = ["RepeatedSchedule", "Repetition", "Task", "repeated_schedule"]


@dataclass(frozen=True, slots=True)
class Task:
    """An action that an IPU performs for every micro-batch, such as the forward pass of a stage.

    A weight update and the exchange of gradients before the update are also tasks. An IPU performs
    these two tasks only once, after the last micro-batch.

    Attributes:
        action: The kind of the action, such as "forward".
        ipu: The number of the IPU that performs the action.
        stage: The number of the pipeline stage or execution phase; None for actions that do not
            belong to a stage, such as a weight update.
        cycle: The number of the pipeline cycle in which the IPU performs the action for the first
            micro-batch, counted from 0.
        group: The position of the action in its pipeline cycle. All IPUs wait for each other
            between the tasks of one group and the tasks of the next group.
    """

    action: Action
    ipu: int
    stage: int | None
    cycle: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Repetition:
    """Pipeline cycles that are repeated, each time for the next micro-batch.

    Attributes:
        first: The number of the first of all these pipeline cycles, counted from 0.
        times: The number of times that the pipeline cycles in ``cycles`` run.
        cycles: The pipeline cycles that are repeated. For each IPU, a pipeline cycle contains a
            number, which is the index of the IPU's tasks in ``RepeatedSchedule.patterns``.
    """

    first: int
    times: int
    cycles: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RepeatedSchedule:
    """The schedule of all IPUs of a replica from one weight update to the next.

    For inference, which has no weight updates, the schedule is that of the whole call of the model.

    Attributes:
        tasks: The tasks of all IPUs. For each IPU and pipeline cycle, the order of the tasks is the
            order of their execution.
        patterns: The different sets of tasks that an IPU performs in one pipeline cycle. A pattern
            contains the indexes of the tasks in ``tasks``, in execution order.
        repetitions: The pipeline cycles of the schedule, in execution order.
        micro_batches: The number of micro-batches between two weight updates.
        every: The number of pipeline cycles from a task for one micro-batch to the same task for
            the next micro-batch.
    """

    tasks: tuple[Task, ...]
    patterns: tuple[tuple[int, ...], ...]
    repetitions: tuple[Repetition, ...]
    micro_batches: int
    every: int

    @property
    def num_cycles(self) -> int:
        """The number of pipeline cycles, including the weight update."""
        return sum(one.times * len(one.cycles) for one in self.repetitions)

    def times_of(self, task: Task) -> int:
        """Return how often an IPU performs a task between two weight updates."""
        return 1 if task.stage is None else self.micro_batches

    def micro_batch(self, task: Task, cycle: int) -> int | None:
        """Return the number of the micro-batch of a task in a pipeline cycle, counted from 1.

        The function returns None for tasks that do not belong to a micro-batch, such as a weight
        update. The pipeline cycles are counted from 0.
        """
        return None if task.stage is None else (cycle - task.cycle) // self.every + 1

    def steps(self, cycle: Sequence[int]) -> list[tuple[Task | None, ...]]:
        """Return the steps of one of the pipeline cycles in ``repetitions``.

        A step contains one task for each IPU, or None for an IPU that is idle in the step.
        """
        by_ipu = [[self.tasks[index] for index in self.patterns[one]] for one in cycle]
        groups = sorted({task.group for tasks in by_ipu for task in tasks})
        return [
            step
            for group in groups
            for step in zip_longest(*([t for t in tasks if t.group == group] for tasks in by_ipu))
        ]


def repeated_schedule(placement: Placement, settings: Settings) -> RepeatedSchedule:
    """Return the schedule of all IPUs of a replica from one weight update to the next.

    The time to make the schedule depends only on the number of stages. If several calls of the
    function differ only in the stages of the operations, the schedule is made once.
    """
    return _repeated(
        placement.ipus,
        settings.strategy,
        settings.recomputing(placement),
        settings.accumulation if settings.is_training else settings.device_iterations,
        is_training=settings.is_training,
        reduces=settings.replicas > 1,
    )


@lru_cache(maxsize=64)
def _repeated(
    ipus: tuple[int, ...],
    strategy: Strategy,
    recomputing: frozenset[int],
    micro_batches: int,
    *,
    is_training: bool,
    reduces: bool,
) -> RepeatedSchedule:
    if strategy == "interleaved" and is_training:
        made, every = _interleaved(ipus, recomputing), 2
    elif strategy in ("grouped", "interleaved"):
        made, every = _grouped(ipus, recomputing, is_training=is_training), 1
    else:
        made = _one_by_one(ipus, strategy, recomputing, is_training=is_training)
        every = 1 + max(task.cycle for task in made)
    made = sorted(made, key=lambda task: (task.group, task.stage))
    patterns: dict[tuple[int, ...], int] = {}
    repetitions = list(_repetitions(made, every, micro_batches, max(ipus) + 1, patterns))
    if is_training:
        last = repetitions[-1]
        end = last.first + last.times * len(last.cycles)
        updating = sorted(set(ipus))
        ending = [Task("exchange", ipu, None, end) for ipu in updating if reduces]
        ending += [Task("update", ipu, None, end, group=1) for ipu in updating]
        by_ipu: list[list[int]] = [[] for _ in range(max(ipus) + 1)]
        for index, task in enumerate(ending, len(made)):
            by_ipu[task.ipu].append(index)
        update = tuple(patterns.setdefault(tuple(own), len(patterns)) for own in by_ipu)
        repetitions.append(Repetition(end, 1, (update,)))
        made = [*made, *ending]
    return RepeatedSchedule(
        tasks=tuple(made),
        patterns=tuple(patterns),
        repetitions=tuple(repetitions),
        micro_batches=micro_batches,
        every=every,
    )


def _repetitions(
    tasks: Sequence[Task],
    every: int,
    micro_batches: int,
    num_ipus: int,
    patterns: dict[tuple[int, ...], int],
) -> Iterator[Repetition]:
    """Yield the repeated pipeline cycles before a weight update, in execution order.

    The function adds all patterns of tasks that it needs, with their indexes, to ``patterns``.
    """
    # A period consists of ``every`` consecutive pipeline cycles. For each task, the number of its
    # first period, and the position of its pipeline cycle in the period.
    places = [divmod(task.cycle, every) for task in tasks]
    firsts = {first for first, _ in places}
    bounds = sorted(firsts | {first + micro_batches for first in firsts})
    for begin, end in pairwise(bounds):
        period: list[list[list[int]]] = [[[] for _ in range(num_ipus)] for _ in range(every)]
        for index, (first, position) in enumerate(places):
            if first <= begin < first + micro_batches:
                period[position][tasks[index].ipu].append(index)
        cycles = tuple(
            tuple(patterns.setdefault(tuple(own), len(patterns)) for own in by_ipu)
            for by_ipu in period
        )
        yield Repetition(begin * every, end - begin, cycles)


def _grouped(ipus: Sequence[int], recomputing: frozenset[int], *, is_training: bool) -> list[Task]:
    """Return the tasks of all IPUs in PopART's pipeline.

    Stage s runs the forward pass of micro-batch m in pipeline cycle m + s. With N stages, stage s
    runs the backward pass of a micro-batch ``2 (N - 1 - s)`` pipeline cycles after its forward
    pass. The last stage runs the forward pass and the backward pass of a micro-batch in the same
    pipeline cycle.
    """
    tasks = []
    last = len(ipus) - 1
    for stage, ipu in enumerate(ipus):
        tasks.append(Task("forward", ipu, stage, stage, group=0))
        if is_training:
            if stage in recomputing:
                tasks.append(Task("recompute", ipu, stage, 2 * last - stage, group=1))
            tasks.append(Task("backward", ipu, stage, 2 * last - stage, group=2))
    return tasks


def _interleaved(ipus: Sequence[int], recomputing: frozenset[int]) -> list[Task]:
    """Return the tasks of all IPUs in an interleaved pipeline.

    In an interleaved pipeline, every stage alternates between forward passes and backward passes.
    When a stage runs a forward pass, the neighbouring stages run backward passes.
    """
    tasks = []
    for stage, ipu in enumerate(ipus):
        backward = 2 * len(ipus) - 1 - stage
        tasks.append(Task("forward", ipu, stage, stage, group=1))
        if stage in recomputing:
            tasks.append(Task("recompute", ipu, stage, backward, group=0))
        tasks.append(Task("backward", ipu, stage, backward, group=1))
    return tasks


def _one_by_one(
    ipus: Sequence[int], strategy: Strategy, recomputing: frozenset[int], *, is_training: bool
) -> list[Task]:
    """Return the tasks of all IPUs in runs without a pipeline, where stages run in turn.

    A phase (a part of the model) is loaded from Streaming Memory before it runs. In parallel phased
    execution, an IPU loads the next phase while another IPU computes.
    """
    passage = list(_passage(len(ipus), recomputing, is_training=is_training))
    if strategy not in ("serial phased", "parallel phased"):
        return [
            Task(action, ipus[stage], stage, cycle) for cycle, (action, stage) in enumerate(passage)
        ]
    tasks: list[Task] = []
    loaded: int | None = None
    cycle = 0
    for (action, stage), (_, following) in pairwise([*passage, passage[-1]]):
        if stage != loaded:
            tasks.append(Task("exchange", ipus[stage], stage, cycle))
            cycle += 1
        tasks.append(Task(action, ipus[stage], stage, cycle))
        loaded = stage
        if strategy == "parallel phased" and ipus[following] != ipus[stage]:
            tasks.append(Task("exchange", ipus[following], following, cycle))
            loaded = following
        cycle += 1
    return tasks


def _passage(
    stages: int, recomputing: frozenset[int], *, is_training: bool
) -> Iterator[tuple[Action, int]]:
    """Yield the actions for one micro-batch in execution order, with their stages."""
    for stage in range(stages):
        yield "forward", stage
    if is_training:
        for stage in reversed(range(stages)):
            if stage in recomputing:
                yield "recompute", stage
            yield "backward", stage
