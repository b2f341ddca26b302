"""The times of the micro-batches and the activities of the IPUs during a modelled call.

The module ``ipu.schedule`` computes the order of the work, and the module ``ipu.cycles`` computes
the cycles that the work takes. This module combines the order and the cycles into times. All IPUs
begin a pipeline cycle at the same time.
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
    """Return a function that computes the modelled times of a call.

    The function returns None without a named device or a captured model. Then the times are
    measured with the host's clock.

    Args:
        run: The input of the device model, or None if the model was not captured.
        options: The options of the PopTorch model. The times are modelled if the options name a
            device.
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
    """The times of one micro-batch, in seconds after the beginning of the call.

    Attributes:
        input: The start of the transfer of the inputs from the host.
        input_complete: The time when all inputs are on the device.
        output: The end of the forward pass.
        output_complete: The time when the results would be on the host, if the host receives the
            results of this micro-batch.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of one call.

    Attributes:
        passages: The times of each micro-batch of a replica, in order.
        cycles: The cycles of the whole call.
    """

    passages: tuple[Passage, ...]
    cycles: int


def timeline(run: Run) -> Timeline:
    """Return the times of each micro-batch of a call.

    The length of a pipeline cycle is in proportion to the work of its slowest IPU.
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
            # With overlapped I/O, I/O tiles load a micro-batch while the other tiles compute the
            # previous micro-batch.
            begin, before = before if settings.overlaps_io else entered, entered
            arrived = begin + receive
            # If the model has one stage, the same forward pass receives the inputs and computes the
            # results, so it cannot end before the inputs have arrived.
            done = max(arrived, start) + last.offload + last.forward
            times = (begin, arrived, done, done + send)
            passages.append(Passage(*(time / ipu.clock for time in times)))
    return Timeline(tuple(passages), report.total)


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


@dataclass(frozen=True, slots=True)
class Window:
    """The activities of the IPUs from one weight update to the next.

    In inference, the window is the whole call.

    Attributes:
        pieces: The activities, sorted by IPU and then by time. Activities of one IPU do not
            overlap.
        cycles: The length of the window in cycles.
        count: The number of windows of a call. The call also includes time of the host, which is
            not part of any window.
    """

    pieces: tuple[Piece, ...]
    cycles: int
    count: int


def window(run: Run) -> Window:
    """Return the activities of every IPU of a replica, with their times in device cycles.

    In each pipeline cycle, an IPU runs its activities one after the other, and then waits for the
    slowest IPU of the cycle.
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
                # Rounding errors must not move the end past the end of the pipeline cycle.
                end = min(now + scale * work, begins[cycle], report.window)
                pieces.append(Piece(ipu, name, now, end, cell.micro_batch, cell.stage))
                now = end
    count = settings.device_iterations if settings.is_training else 1
    return Window(tuple(pieces), report.window, count)


def _laid_out(run: Run) -> tuple[CycleReport, Schedule, float, list[float]]:
    """Return a window's cycle report, its schedule, a scale, and the starts of its pipeline cycles.

    The window also contains copies and synchronisations between IPUs, which the pipeline cycles of
    the schedule do not contain. The scale stretches the pipeline cycles so that together they are
    as long as the window.
    """
    settings = run.settings
    report = cycles(run.graph, run.placement, settings, run.ipu, run.model)
    made = schedule(run.placement, settings.one_window)
    lengths = cycle_lengths(made, report.stages, run.placement, settings)
    scale = report.window / (sum(lengths) or 1)
    return report, made, scale, [0.0, *(scale * done for done in accumulate(lengths))]


def _ends(rows: Sequence[Sequence[Cell]], last: int) -> tuple[dict[int, Cell], dict[int, Cell]]:
    """Return the cells with forward passes of the first and the last stage, by micro-batch."""
    forwards = [cell for row in rows for cell in row if cell.action == "forward"]
    forwards.sort(key=lambda cell: cell.step)
    first, end = (
        {cell.micro_batch: cell for cell in forwards if cell.stage == stage and cell.micro_batch}
        for stage in (0, last)
    )
    return first, end
