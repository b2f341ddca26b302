"""The start and end of each IPU's work in a window (the time from one weight update to the next).

The module ``schedule`` computes the order of the IPUs' work, and the module ``stage_cycles``
computes the clock cycles that each stage of the model needs. The function ``lay_out`` combines the
order of the IPUs' work and the clock cycles of the stages into the work of each IPU in each
pipeline cycle. A pipeline cycle is a part of the schedule that all IPUs begin at the same time. The
slowest IPU determines the length of a pipeline cycle. No other module adds up the clock cycles that
the IPUs need for a schedule.
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
# The parts (such as "load" and "forward") of one action of an IPU in execution order. Each part is
# a pair of its name and its clock cycles.
_Parts: TypeAlias = tuple[tuple[str, float], ...]
# An action of an IPU (such as a forward pass), the number of its pipeline cycle, and its parts.
_PlacedCell: TypeAlias = tuple[Cell, int, _Parts]


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
            model also includes work of the host, which is not part of an accumulation window (the
            time from one weight update to the next).
        cells: For each IPU, the actions (such as forward passes) that the IPU performs in the
            window. Each action (such as a forward pass) is given with the number of its pipeline
            cycle. The parts of the action are pairs of name and clock cycles.
        lengths: The clock cycles of each pipeline cycle, without copies and synchronisations
            between IPUs.
    """

    length: float
    busy: tuple[float, ...]
    count: int
    cells: tuple[tuple[_PlacedCell, ...], ...]
    lengths: tuple[float, ...]

    @property
    def cycles(self) -> int:
        """The time from one weight update to the next, in whole clock cycles."""
        return round(self.length)

    @property
    def _scale(self) -> float:
        """The number that multiplies the pipeline cycles so that they fill the whole window.

        The attribute ``length`` includes copies and synchronisations between IPUs, but ``lengths``
        does not include them.
        """
        return self.cycles / (sum(self.lengths) or 1)

    def _begins(self) -> list[float]:
        """Return the start of each pipeline cycle and the end of the last one, in clock cycles."""
        scale = self._scale
        return [0.0, *(scale * done for done in accumulate(self.lengths))]

    def forward_begins(self, stage: int) -> dict[int, float]:
        """Return the start of the pipeline cycle with a stage's forward pass of each micro-batch.

        Args:
            stage: The number of the pipeline stage or execution phase.

        Returns:
            A mapping from the number of each micro-batch to the start of a pipeline cycle, in clock
            cycles after the last weight update.
        """
        begins = self._begins()
        return {
            cell.micro_batch: begins[cycle - 1]
            for placed in self.cells
            for cell, cycle, _ in placed
            if cell.action == "forward" and cell.stage == stage and cell.micro_batch is not None
        }

    def pieces(self) -> tuple[Piece, ...]:
        """Return the IPUs' activities between two weight updates, sorted by IPU and then by time.

        In each pipeline cycle, an IPU performs its activities one after the other. An IPU that has
        finished its activities waits until the slowest IPU ends the same pipeline cycle. Activities
        of one IPU do not overlap in time.
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
                    # Rounding errors must not move the end of an activity past the end of its
                    # pipeline cycle.
                    end = min(now + scale * work, begins[cycle], whole)
                    pieces.append(Piece(ipu, name, now, end, cell.micro_batch, cell.stage))
                    now = end
        return tuple(pieces)


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
    """Return the actions of one IPU, its computing time, and its work per pipeline cycle.

    Args:
        row: The action (such as a forward pass) of the IPU in each step of the schedule.
        pipeline_cycles: For each step of the schedule (one action of each IPU), the number of its
            pipeline cycle.
        parts_of: A function that returns the parts of an IPU's action (such as "load" and
            "forward"), with their clock cycles. The arguments of ``parts_of`` are the name of the
            action and the number of the pipeline stage.
    """
    # The clock cycles of each different action of an IPU are computed only once, because a schedule
    # repeats the same few actions many times.
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
    """Return an IPU's clock cycles for loading the inputs of each pipeline cycle on I/O tiles."""
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
    """Return the parts of an IPU's action in execution order, as pairs of name and clock cycles.

    If I/O tiles load the inputs of the model, the part "transfer" of an action has 0 clock cycles,
    because the other tiles compute at the same time.

    Args:
        stages: The clock cycles of all stages of the model.
        own: The clock cycles of the pipeline stages that run on the IPU of the action.
        settings: The options of the run, such as the number of replicas.
        action: The action of the IPU, such as "forward". The argument ``action`` must not be
            "idle".
        stage: The number of the pipeline stage or execution phase; None for actions that do not
            belong to a stage, such as a weight update.
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
    """Return the clock cycles for copies between IPUs from one weight update to the next.

    In a pipeline, all pairs of IPUs copy at the same time, once in each of the ``num_cycles``
    pipeline cycles.
    """
    if settings.is_phased:
        return 0.0  # Execution phases exchange data through DRAM outside the IPU.
    ways = 2 if settings.is_training else 1
    if settings.is_pipelined:
        return ways * num_cycles * max(stage.copy for stage in stages)
    return ways * settings.micro_batches * sum(stage.copy for stage in stages)
