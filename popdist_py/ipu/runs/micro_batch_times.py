"""The estimated times of the micro-batches in one call of a model on IPUs.

The times are computed from the schedule between two weight updates. All weight updates of a call
have the same schedule. The module ``micro_batch_times`` only estimates times, and does not measure
times.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.cycles import cycles_and_window
from popdist_py.ipu.searches import Run

__all__ = ["Passage", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class Passage:
    """The times of one micro-batch, in seconds after the beginning of the call of the model.

    Attributes:
        input: The time when the transfer of the inputs from the host begins.
        input_complete: The time when all inputs of the micro-batch are on the IPUs.
        output: The time when the forward pass of the micro-batch ends.
        output_complete: The time when the results of the micro-batch would be on the host.
            PopTorch's output mode (which micro-batches' outputs a call returns) decides whether the
            host receives the results of a micro-batch.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The estimated times of one call of a model.

    Attributes:
        passages: The times of each micro-batch of a replica as ``Passage`` objects, in execution
            order.
        cycles: The clock cycles of the whole call of the model.
    """

    passages: tuple[Passage, ...]
    cycles: int


def timeline(run: Run) -> Timeline:
    """Return the estimated times of each micro-batch in one call of a model.

    The length of a pipeline cycle is proportional to the work of the slowest IPU in the cycle.
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
            # With overlapped I/O, the I/O tiles load a micro-batch while the other tiles compute
            # the previous micro-batch.
            begin, before = before if settings.overlaps_io else entered, entered
            arrived = begin + receive
            # If the model has one stage, the same forward pass receives the inputs and computes the
            # results. The forward pass of a model cannot end before its inputs have arrived.
            done = max(arrived, begin_of_last) + last.offload + last.forward
            times = (begin, arrived, done, done + send)
            passages.append(Passage(*(time / ipu.clock for time in times)))
    return Timeline(tuple(passages), report.total)
