"""The times of the micro-batches of a modelled call.

The times are computed from the layout of a window, because all windows of a call are equal. This
module does not measure times.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.searches import Run

__all__ = ["Passage", "Timeline", "timeline"]


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
    report, window = cycles_and_window(run.graph, placement, settings, ipu, run.model)
    first_begins = window.forward_begins(0)
    last_begins = window.forward_begins(placement.num_stages - 1)
    receive = sum(stage.receive for stage in report.stages)
    sent = sum(run.graph.bytes_of(name) for name in run.graph.outputs)
    send = sent * ipu.clock / run.model.host_bandwidth
    last = report.stages[-1]
    passages = []
    before = 0.0
    for number in range(window.count):
        start = number * window.cycles
        for micro_batch, begin_of_first in first_begins.items():
            entered = start + begin_of_first
            begin_of_last = start + last_begins[micro_batch]
            # With overlapped I/O, I/O tiles load a micro-batch while the other tiles compute the
            # previous micro-batch.
            begin, before = before if settings.overlaps_io else entered, entered
            arrived = begin + receive
            # If the model has one stage, the same forward pass receives the inputs and computes the
            # results, so it cannot end before the inputs have arrived.
            done = max(arrived, begin_of_last) + last.offload + last.forward
            times = (begin, arrived, done, done + send)
            passages.append(Passage(*(time / ipu.clock for time in times)))
    return Timeline(tuple(passages), report.total)
