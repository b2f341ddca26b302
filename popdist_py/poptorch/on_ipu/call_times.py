"""When each micro-batch of a call comes and goes on the device that is named.

The cycles of the device's model laid out along its schedule, as fine as that is: what happens in
one cycle of a pipeline begins together.
Nothing here decides how long an operation takes or in which order anything happens, or measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from popdist_py.ipu.cycles import StageCycles, cycles
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import Cell, schedule
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.execution.timings import CallTimes
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["Passage", "Timeline", "modelled_times", "timeline"]


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
    report = cycles(run.graph, placement, settings, ipu, run.model)
    one = replace(settings, device_iterations=1) if settings.is_training else settings
    made = schedule(placement, one)
    works = _works(made.rows, made.cycles, report.stages, placement)
    scale = report.window / (sum(works) or 1)
    begins = [0.0, *(scale * done for done in accumulate(works))]
    arrivals, results = _ends(made.rows, placement.num_stages - 1)
    receive = sum(stage.receive for stage in report.stages)
    sent = sum(run.graph.bytes_of(name) for name in run.graph.outputs)
    send = sent * ipu.clock / run.model.host_bandwidth
    windows = settings.device_iterations if settings.is_training else 1
    passages = []
    for window in range(windows):
        for number, arrival in arrivals.items():
            begin = window * report.window + begins[made.cycles[arrival.step - 1] - 1]
            start = window * report.window + begins[made.cycles[results[number].step - 1] - 1]
            arrived = begin + receive
            # On one stage the same forward receives and gives results.
            done = max(arrived, start) + report.stages[-1].forward
            times = (begin, arrived, done, done + send)
            passages.append(Passage(*(time / ipu.clock for time in times)))
    return Timeline(tuple(passages), report.total)


def _works(
    rows: Sequence[Sequence[Cell]],
    numbers: Sequence[int],
    stages: Sequence[StageCycles],
    placement: Placement,
) -> list[float]:
    """Return, for each cycle of the schedule, the work of the IPU that has most."""
    works = [[0.0] * len(rows) for _ in range(max(numbers, default=0))]
    for ipu, row in enumerate(rows):
        own = [s for s, where in zip(stages, placement.ipus, strict=True) if where == ipu]
        for cell in row:
            works[numbers[cell.step - 1] - 1][ipu] += _work(cell, stages, own)
    return [max(of_ipus) for of_ipus in works]


def _work(cell: Cell, stages: Sequence[StageCycles], own: Sequence[StageCycles]) -> float:
    if cell.action == "idle":
        return 0.0
    if cell.action == "update":
        return sum(stage.update for stage in own)
    if cell.stage is None:
        return sum(stage.all_reduce for stage in own)
    here = stages[cell.stage]
    return {
        "forward": here.forward + here.receive,
        "recompute": here.recompute,
        "backward": here.backward,
        "exchange": here.load,
    }[cell.action]


def _ends(rows: Sequence[Sequence[Cell]], last: int) -> tuple[dict[int, Cell], dict[int, Cell]]:
    """Return, by micro-batch, the cells in which it enters the first stage and the last one."""
    forwards = [cell for row in rows for cell in row if cell.action == "forward"]
    forwards.sort(key=lambda cell: cell.step)
    first, end = (
        {cell.micro_batch: cell for cell in forwards if cell.stage == stage and cell.micro_batch}
        for stage in (0, last)
    )
    return first, end
