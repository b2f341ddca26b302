"""The schedule of a window and its times, computed for one cell (task of an IPU) after the other.

The library computes equal pipeline cycles once. These functions compute every cell alone, so that
tests can compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

from popdist_py.ipu.accumulation_window import Piece
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.stage_cycles import CycleModel, StageCycles

# The action, micro-batch and stage of each of an IPU's tasks that begin together.
Group = Mapping[int, list[tuple[str, int | None, int | None]]]
COMPUTING = ("forward", "recompute", "backward", "update")


class Cells:
    """All cells of a call: for each IPU its actions, and the pipeline cycle of each step."""

    def __init__(self, placement: Placement, settings: Settings) -> None:
        self.rows: list[list[tuple[str, int | None, int | None]]]
        self.rows = [[] for _ in range(placement.num_ipus)]
        self.cycles: list[int] = []
        for cycle, group in _task_groups(placement, settings):
            for index in range(max(map(len, group.values()), default=0)):
                self.cycles.append(cycle)
                for ipu, row in enumerate(self.rows):
                    tasks = group.get(ipu, [])
                    row.append(tasks[index] if index < len(tasks) else ("idle", None, None))


class Times:
    """The times of one window, added up cell by cell."""

    def __init__(
        self,
        stages: Sequence[StageCycles],
        placement: Placement,
        settings: Settings,
        model: CycleModel,
    ) -> None:
        one = settings.one_window
        made = Cells(placement, one)
        count = max(made.cycles)
        self.busy = [0.0] * placement.num_ipus
        self.placed: list[tuple[int, int, tuple[str, int | None, int | None], list]] = []
        lengths = [0.0] * count
        for ipu, row in enumerate(made.rows):
            working, arriving = [0.0] * count, [0.0] * count
            own = [s for s, where in zip(stages, placement.ipus, strict=True) if where == ipu]
            for cell, cycle in zip(row, made.cycles, strict=True):
                if cell[0] == "idle":
                    continue
                parts = _parts(stages, own, settings, cell)
                work = sum(work for _, work in parts)
                self.placed.append((ipu, cycle, cell, parts))
                working[cycle - 1] += work
                self.busy[ipu] += work if cell[0] in COMPUTING else 0.0
                if cell[0] == "forward" and settings.overlaps_io:
                    arriving[cycle - 1] += stages[cell[2]].receive
            lengths = list(map(max, lengths, working, arriving))
        synchronising = count * model.sync_cycles * (placement.num_ipus > 1)
        self.length = sum(lengths) + _copies(stages, one, count) + synchronising
        self.scale = round(self.length) / (sum(lengths) or 1)
        self.begins = [0.0, *(self.scale * done for done in accumulate(lengths))]

    def forward_begins(self, stage: int) -> dict[int, float]:
        """Return the start of the pipeline cycle of a stage's forward pass of each micro-batch."""
        return {
            cell[1]: self.begins[cycle - 1]
            for _, cycle, cell, _ in self.placed
            if (cell[0], cell[2]) == ("forward", stage)
        }

    def pieces(self) -> list[Piece]:
        """Return all activities, sorted by IPU and then by time."""
        found: list[Piece] = []
        now, last = 0.0, (-1, 0)
        for ipu, cycle, (_, number, stage), parts in self.placed:
            if (ipu, cycle) != last:
                now, last = self.begins[cycle - 1], (ipu, cycle)
            for name, work in parts:
                if work:
                    end = now + self.scale * work
                    found.append(Piece(ipu, name, now, end, number, stage))
                    now = end
        return found


def _task_groups(placement: Placement, settings: Settings) -> Iterator[tuple[int, Group]]:
    window = settings.accumulation if settings.is_training else settings.device_iterations
    windows = settings.device_iterations if settings.is_training else 1
    cycle = 0
    for index in range(windows):
        for groups in _window(placement, settings, index * window + 1, window):
            cycle += 1
            yield from ((cycle, group) for group in groups if group)
        if settings.is_training:
            cycle += 1
            if settings.replicas > 1:
                yield cycle, {ipu: [("exchange", None, None)] for ipu in set(placement.ipus)}
            yield cycle, {ipu: [("update", None, None)] for ipu in set(placement.ipus)}


def _window(
    placement: Placement, settings: Settings, first: int, count: int
) -> Iterator[list[Group]]:
    if settings.strategy == "interleaved" and settings.is_training:
        return _interleaved(placement, settings, first, count)
    if settings.is_pipelined:
        return _grouped(placement, settings, first, count)
    one = _phased if settings.is_phased else _one_by_one
    numbers = range(first, first + count)
    return chain.from_iterable(one(placement, settings, number) for number in numbers)


def _grouped(
    placement: Placement, settings: Settings, first: int, count: int
) -> Iterator[list[Group]]:
    last = placement.num_stages - 1
    recomputing = settings.recomputing(placement)
    for cycle in range(count + (2 * last if settings.is_training else last)):
        forward, again, backward = {}, {}, {}
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
) -> Iterator[list[Group]]:
    stages = placement.num_stages
    recomputing = settings.recomputing(placement)
    for cycle in range(2 * (count + stages - 1)):
        again, now = {}, {}
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


def _one_by_one(placement: Placement, settings: Settings, number: int) -> Iterator[list[Group]]:
    for action, stage in _passage(placement, settings):
        yield [{placement.ipus[stage]: [(action, number, stage)]}]


def _phased(placement: Placement, settings: Settings, number: int) -> Iterator[list[Group]]:
    loaded = None
    tasks = list(_passage(placement, settings))
    for index, (action, stage) in enumerate(tasks):
        ipu = placement.ipus[stage]
        if stage != loaded:
            yield [{ipu: [("exchange", number, stage)]}]
        group = {ipu: [(action, number, stage)]}
        loaded = stage
        if settings.strategy == "parallel phased" and index + 1 < len(tasks):
            following = tasks[index + 1][1]
            if placement.ipus[following] != ipu:
                group[placement.ipus[following]] = [("exchange", number, following)]
                loaded = following
        yield [group]


def _passage(placement: Placement, settings: Settings) -> Iterator[tuple[str, int]]:
    recomputing = settings.recomputing(placement)
    for stage in range(placement.num_stages):
        yield "forward", stage
    if settings.is_training:
        for stage in reversed(range(placement.num_stages)):
            if stage in recomputing:
                yield "recompute", stage
            yield "backward", stage


def _parts(
    stages: Sequence[StageCycles],
    own: Sequence[StageCycles],
    settings: Settings,
    cell: tuple[str, int | None, int | None],
) -> list[tuple[str, float]]:
    action, _, stage = cell
    if action == "update":
        return [("update", sum(s.update for s in own))]
    if stage is None:
        return [("reduce", sum(s.all_reduce for s in own))]
    here = stages[stage]
    if action == "forward":
        transfer = 0.0 if settings.overlaps_io else here.receive
        return [("transfer", transfer), ("load", here.offload), ("forward", here.forward)]
    return [("load", here.load)] if action == "exchange" else [(action, getattr(here, action))]


def _copies(stages: Sequence[StageCycles], settings: Settings, num_cycles: int) -> float:
    if settings.is_phased:
        return 0.0
    there = [stage.copy for stage in stages]
    back = [stage.copy_gradients for stage in stages]
    if settings.is_pipelined:
        return num_cycles * (max(there) + max(back))
    return settings.micro_batches * sum([*there, *back])
