"""When each micro-batch of a call comes and goes on the device that is named.

The cycles of the device's model laid out along its schedule, as fine as that is: what happens in
one cycle of a pipeline begins together.
Nothing here decides how long an operation takes or in which order anything happens, or measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from popdist_py.ipu.cycles import CycleReport, cell_parts, cycle_lengths, cycles
from popdist_py.ipu.schedule import Cell, Schedule, schedule
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.execution.timings import CallTimes
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["Passage", "Piece", "Timeline", "Window", "modelled_times", "timeline", "window"]


def modelled_times(run: Run | None, options: Options) -> Callable[[], CallTimes] | None:
    """Return what tells the times of each call of a run; None where the host's count.

    Args:
        run: what the model of the device is asked about; None if it cannot be.
        options: of the run: its times are modelled where they name a device.
    """
    if options.Emulator.device_named is None:
        return None
    speaks = options.Distributed.processId == 0
    if run is None:
        if speaks:
            logger.info("Cycles and latencies are this machine's: the model was not captured")
        return None
    return partial(_times, run, speaks=speaks)


def _times(run: Run, *, speaks: bool) -> CallTimes:
    if speaks:
        name = run.ipu.name.capitalize()
        logger.info(
            "Cycles and latencies are those of the model of an %s, not of this machine", name
        )
    made = timeline(run)
    events = ("input", "input_complete", "output", "output_complete")
    return CallTimes(
        {event: [getattr(passage, event) for passage in made.passages] for event in events},
        made.cycles,
    )


@dataclass(frozen=True, slots=True)
class Passage:
    """One micro-batch, in seconds from the beginning of the call.

    Attributes:
        input: its transfer from the host begins.
        input_complete: it is on the device.
        output: its forward is done.
        output_complete: its results would be on the host.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One call.

    Attributes:
        passages: of each micro-batch of a replica, in order.
        cycles: of the call.
    """

    passages: tuple[Passage, ...]
    cycles: int


def timeline(run: Run) -> Timeline:
    """Return when each micro-batch of a call comes and goes.

    A cycle of the schedule takes the part of an update's window that its slowest IPU needs.
    """
    placement, settings, ipu = run.placement, run.settings, run.ipu
    report, made, _, begins = _laid_out(run)
    arrivals, results = _ends(made.rows, placement.num_stages - 1)
    receive = sum(stage.receive for stage in report.stages)
    sent = sum(run.graph.bytes_of(name) for name in run.graph.outputs)
    send = sent * ipu.clock / run.model.host_bandwidth
    windows = settings.device_iterations if settings.is_training else 1
    last = report.stages[-1]
    passages = []
    before = 0.0
    for window in range(windows):
        for number, arrival in arrivals.items():
            entered = window * report.window + begins[made.cycles[arrival.step - 1] - 1]
            start = window * report.window + begins[made.cycles[results[number].step - 1] - 1]
            # I/O tiles load a micro-batch while the other tiles compute the previous one.
            begin, before = before if settings.overlaps_io else entered, entered
            arrived = begin + receive
            # On one stage the same forward receives and gives results.
            done = max(arrived, start) + last.offload + last.forward
            times = (begin, arrived, done, done + send)
            passages.append(Passage(*(time / ipu.clock for time in times)))
    return Timeline(tuple(passages), report.total)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one IPU does at a time.

    Attributes:
        ipu: which one.
        name: "transfer" of inputs from the host, "forward", "recompute", "backward", "load" from
            Streaming Memory, "reduce" over the replicas, "update".
        begin: cycles from the beginning of the window.
        end: the same.
        micro_batch: of which, counted from 1 in the window; None where none is meant.
        stage: of which stage or phase; None where none is meant.
    """

    ipu: int
    name: str
    begin: float
    end: float
    micro_batch: int | None = None
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What the IPUs do from one update to the next; in inference, during a call.

    Attributes:
        pieces: for each IPU in the order of time, and apart.
        cycles: of the window.
        count: windows of a call; what the host takes beside them is left out.
    """

    pieces: tuple[Piece, ...]
    cycles: int
    count: int


def window(run: Run) -> Window:
    """Return what every IPU of a replica does, cycle by cycle of the device.

    In a cycle of the schedule an IPU does one thing after the other, and then waits for the IPU
    that has most to do.
    """
    report, made, scale, begins = _laid_out(run)
    placement, settings = run.placement, run.settings
    pieces = []
    for ipu, row in enumerate(made.rows):
        now, last = 0.0, 0
        for cell in row:
            cycle = made.cycles[cell.step - 1]
            if cycle != last:
                now, last = begins[cycle - 1], cycle
            for name, work in cell_parts(cell, ipu, report.stages, placement, settings):
                if not work:
                    continue
                # Not later, by rounding, than what follows.
                end = min(now + scale * work, begins[cycle], report.window)
                pieces.append(Piece(ipu, name, now, end, cell.micro_batch, cell.stage))
                now = end
    count = settings.device_iterations if settings.is_training else 1
    return Window(tuple(pieces), report.window, count)


def _laid_out(run: Run) -> tuple[CycleReport, Schedule, float, list[float]]:
    """Return a window's cycle report, its schedule, and the scale and begins of its cycles.

    The scale stretches the cycles of the schedule to the length of the window, which also has the
    copies and synchronisations between IPUs.
    """
    settings = run.settings
    report = cycles(run.graph, run.placement, settings, run.ipu, run.model)
    made = schedule(run.placement, settings.one_window)
    lengths = cycle_lengths(made, report.stages, run.placement, settings)
    scale = report.window / (sum(lengths) or 1)
    return report, made, scale, [0.0, *(scale * done for done in accumulate(lengths))]


def _ends(rows: Sequence[Sequence[Cell]], last: int) -> tuple[dict[int, Cell], dict[int, Cell]]:
    """Return, by micro-batch, the cells in which it enters the first stage and the last one."""
    forwards = [cell for row in rows for cell in row if cell.action == "forward"]
    forwards.sort(key=lambda cell: cell.step)
    first, end = (
        {cell.micro_batch: cell for cell in forwards if cell.stage == stage and cell.micro_batch}
        for stage in (0, last)
    )
    return first, end
