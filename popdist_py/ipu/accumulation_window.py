"""The layout of a window, which is the time of all IPUs from one weight update to the next.

The module ``schedule`` computes the order of the work, and the module ``stage_cycles`` computes the
cycles of each stage. The function ``lay_out`` combines the order and the cycles into the work of
each IPU in each pipeline cycle. All IPUs begin a pipeline cycle at the same time, and the slowest
IPU determines its length. No other module adds up the cycles of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.schedule_views import Action, Cell
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.stage_cycles import CycleModel, StageCycles

__all__ = ["Piece", "Window", "lay_out"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One activity of one IPU.

    Attributes:
        ipu: The number of the IPU.
        name: The kind of activity, which is "transfer" (inputs from the host), "forward",
            "recompute", "backward", "load" (from Streaming Memory), "reduce" (over the replicas) or
            "update".
        begin: The start, in cycles after the beginning of the window.
        end: The end, in cycles after the beginning of the window.
        micro_batch: The number of the micro-batch, counted from 1 in the window. None stands for
            activities that do not belong to a micro-batch.
        stage: The number of the stage or phase. None stands for activities that do not belong to a
            stage.
    """

    ipu: int
    name: str
    begin: float
    end: float
    micro_batch: int | None = None
    stage: int | None = None


# The actions during which an IPU counts as busy.
_COMPUTING: Final = ("forward", "recompute", "backward", "update")
# The parts of a cell of the schedule in execution order, as pairs of name and cycles.
_Parts: TypeAlias = tuple[tuple[str, float], ...]
# A cell with an action, the number of its pipeline cycle, and its parts.
_PlacedCell: TypeAlias = tuple[Cell, int, _Parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The work of the IPUs from one weight update to the next.

    In inference, the window is the whole call.

    Attributes:
        length: The length of the window in cycles, with copies and synchronisations between IPUs.
        busy: The cycles that each IPU spends on computing.
        count: The number of windows of a call. The call also includes time of the host, which is
            not part of any window.
        cells: The cells of the schedule in which each IPU acts, with the number of their pipeline
            cycle and their parts.
        lengths: The length of each pipeline cycle, without copies and synchronisations between
            IPUs.
    """

    length: float
    busy: tuple[float, ...]
    count: int
    cells: tuple[tuple[_PlacedCell, ...], ...]
    lengths: tuple[float, ...]

    @property
    def cycles(self) -> int:
        """The length of the window in whole cycles."""
        return round(self.length)

    @property
    def _scale(self) -> float:
        """The factor that makes the pipeline cycles together as long as the window.

        The window also contains copies and synchronisations between IPUs, which the lengths of the
        pipeline cycles do not contain.
        """
        return self.cycles / (sum(self.lengths) or 1)

    def _begins(self) -> list[float]:
        """Return the start of each pipeline cycle, and the end of the last pipeline cycle."""
        scale = self._scale
        return [0.0, *(scale * done for done in accumulate(self.lengths))]

    def forward_begins(self, stage: int) -> dict[int, float]:
        """Return the start of the pipeline cycle in which a stage runs each forward pass.

        Args:
            stage: The number of the stage or phase.

        Returns:
            A mapping from the number of each micro-batch to the cycles after the beginning of the
            window.
        """
        begins = self._begins()
        return {
            cell.micro_batch: begins[cycle - 1]
            for placed in self.cells
            for cell, cycle, _ in placed
            if cell.action == "forward" and cell.stage == stage and cell.micro_batch is not None
        }

    def pieces(self) -> tuple[Piece, ...]:
        """Return the activities, sorted by IPU and then by time.

        In each pipeline cycle, an IPU runs its activities one after the other, and then waits for
        the slowest IPU of the cycle. Activities of one IPU do not overlap.
        """
        scale, begins, whole = self._scale, self._begins(), self.cycles
        pieces = []
        for ipu, placed in enumerate(self.cells):
            now, last = 0.0, 0
            for cell, cycle, parts in placed:
                if cycle != last:
                    now, last = begins[cycle - 1], cycle
                for name, work in parts:
                    if not work:
                        continue
                    # Rounding errors must not move the end past the end of the pipeline cycle.
                    end = min(now + scale * work, begins[cycle], whole)
                    pieces.append(Piece(ipu, name, now, end, cell.micro_batch, cell.stage))
                    now = end
        return tuple(pieces)


def lay_out(
    stages: Sequence[StageCycles], placement: Placement, settings: Settings, model: CycleModel
) -> Window:
    """Return the layout of a window of a run.

    I/O tiles load the inputs while the other tiles compute, so only the longer of these two times
    counts for the length of a pipeline cycle.

    Args:
        stages: The cycles of each stage.
        placement: The stages and their IPUs.
        settings: The settings of the run.
        model: The constants of the model of time.
    """
    one = settings.one_window
    made = schedule(placement, one)
    num_cycles = max(made.cycles, default=0)
    lengths = [0.0] * num_cycles
    busy = []
    cells = []
    for ipu, row in enumerate(made.rows):
        own = [s for s, where in zip(stages, placement.ipus, strict=True) if where == ipu]
        placed, computing, working = _walked(
            row, made.cycles, partial(_parts, stages, own, settings)
        )
        cells.append(placed)
        busy.append(computing)
        lengths = list(map(max, lengths, working))
        if settings.overlaps_io:
            lengths = list(map(max, lengths, _arriving(placed, stages, num_cycles)))
    length = sum(lengths) + _copies(stages, one, num_cycles)
    return Window(
        length=length + num_cycles * model.sync_cycles * (placement.num_ipus > 1),
        busy=tuple(busy),
        count=settings.device_iterations if settings.is_training else 1,
        cells=tuple(cells),
        lengths=tuple(lengths),
    )


def _walked(
    row: Sequence[Cell],
    pipeline_cycles: Sequence[int],
    parts_of: Callable[[Action, int | None], _Parts],
) -> tuple[tuple[_PlacedCell, ...], float, list[float]]:
    """Return an IPU's cells with an action, its computing time, and its work per pipeline cycle.

    Args:
        row: The IPU's cell in each step.
        pipeline_cycles: The number of the pipeline cycle of each step.
        parts_of: A function that returns the parts of an action of a stage.
    """
    # A schedule has many cells and few different actions of stages.
    known: dict[tuple[Action, int | None], tuple[_Parts, float]] = {}
    working = [0.0] * max(pipeline_cycles, default=0)
    computing = 0.0
    placed = []
    for cell, cycle in zip(row, pipeline_cycles, strict=True):
        if cell.action == "idle":
            continue
        task = cell.action, cell.stage
        if task not in known:
            parts = parts_of(*task)
            known[task] = parts, sum(work for _, work in parts)
        parts, work = known[task]
        placed.append((cell, cycle, parts))
        working[cycle - 1] += work
        if cell.action in _COMPUTING:
            computing += work
    return tuple(placed), computing, working


def _arriving(
    placed: Sequence[_PlacedCell], stages: Sequence[StageCycles], num_cycles: int
) -> list[float]:
    """Return the cycles that an IPU's I/O tiles need for the inputs of each pipeline cycle."""
    arriving = [0.0] * num_cycles
    for cell, cycle, _ in placed:
        if cell.action == "forward" and cell.stage is not None:
            arriving[cycle - 1] += stages[cell.stage].receive
    return arriving


def _parts(
    stages: Sequence[StageCycles],
    own: Sequence[StageCycles],
    settings: Settings,
    action: Action,
    stage: int | None,
) -> _Parts:
    """Return the parts of an action in execution order, as pairs of name and cycles.

    If I/O tiles load the inputs, the transfer of inputs has 0 cycles, because the other tiles
    compute at the same time.

    Args:
        stages: The cycles of all stages.
        own: The cycles of the stages of the IPU that performs the action.
        settings: The settings of the run.
        action: The action, which is not "idle".
        stage: The number of the stage or phase, or None.
    """
    if action == "update":
        return (("update", sum(s.update for s in own)),)
    if stage is None:
        return (("reduce", sum(s.all_reduce for s in own)),)
    here = stages[stage]
    if action == "forward":
        transfer = 0.0 if settings.overlaps_io else here.receive
        return (("transfer", transfer), ("load", here.offload), ("forward", here.forward))
    if action == "recompute":
        return (("recompute", here.recompute),)
    return (("backward", here.backward),) if action == "backward" else (("load", here.load),)


def _copies(stages: Sequence[StageCycles], settings: Settings, num_cycles: int) -> float:
    """Return the cycles of copies between IPUs.

    In a pipeline, all pairs of IPUs copy at the same time, once in each of its ``num_cycles``
    pipeline cycles.
    """
    if settings.is_phased:
        return 0.0  # Phases exchange data through Streaming Memory instead.
    ways = 2 if settings.is_training else 1
    if settings.is_pipelined:
        return ways * num_cycles * max(stage.copy for stage in stages)
    return ways * settings.micro_batches * sum(stage.copy for stage in stages)
