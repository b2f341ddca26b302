"""The clock cycles that an IPU needs for one call of a model, estimated from its stages.

A call of a training model contains one or more weight updates, and work of the host. The time from
one weight update to the next (an accumulation window) is equal for all weight updates of a call.
The module ``cycles`` only estimates clock cycles, and does not measure times.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.accumulation_window import Window, lay_out
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.stage_cycles import CYCLE_MODEL, CycleModel, StageCycles, stage_cycles
from popdist_py.ipu.transfers import host_traffic

__all__ = [
    "CYCLE_MODEL",
    "CycleModel",
    "CycleReport",
    "StageCycles",
    "call_total",
    "cycles",
    "cycles_and_window",
    "sending_seconds",
]


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The clock cycles that one call of a model takes.

    Attributes:
        stages: The clock cycles of each pipeline stage.
        window: The clock cycles from one weight update to the next, including one weight update.
            For inference, ``window`` is the number of clock cycles for all micro-batches of the
            call.
        call: The clock cycles that a call of the model needs in addition to its micro-batches and
            weight updates. For example, the IPUs send results to the host.
        total: The clock cycles of the whole call of the model.
        busy: For each IPU, the time that the IPU spends on computing, divided by the duration of
            the call.
        clock: The number of clock cycles per second.
        samples: The number of samples that all replicas together process in one call of the model.
    """

    stages: tuple[StageCycles, ...]
    window: int
    call: int
    total: int
    busy: tuple[float, ...]
    clock: float
    samples: int

    @property
    def seconds(self) -> float:
        """The duration of one call of the model in seconds."""
        return self.total / self.clock

    @property
    def throughput(self) -> float:
        """The number of samples that all replicas together process per second."""
        return self.samples / self.seconds


def cycles(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel = CYCLE_MODEL,
) -> CycleReport:
    """Return the clock cycles that one call of a model takes."""
    return cycles_and_window(graph, placement, settings, ipu, model)[0]


def cycles_and_window(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    model: CycleModel = CYCLE_MODEL,
) -> tuple[CycleReport, Window]:
    """Return the clock cycles of one call of a model, and the IPUs' work between weight updates."""
    stages = tuple(
        stage_cycles(graph, placement, settings, ipu, stage, model)
        for stage in range(placement.num_stages)
    )
    window = lay_out(stages, placement, settings, model)
    sending = sending_seconds(graph, placement, settings, model)
    call, total = call_total(window.count * window.length, sending, settings, ipu, model)
    report = CycleReport(
        stages=stages,
        window=window.cycles,
        call=round(call),
        total=round(total),
        busy=tuple(window.count * one / total for one in window.busy),
        clock=ipu.clock,
        samples=graph.batch * settings.micro_batches * settings.replicas,
    )
    return report, window


def sending_seconds(
    graph: Graph, placement: Placement, settings: Settings, model: CycleModel
) -> float:
    """Return the seconds in which the IPUs send the outputs of a call to the host.

    The IPUs send their outputs at the same time. An IPU sends all outputs of a micro-batch in one
    transfer.
    """
    sent = max(traffic.sent for traffic in host_traffic(graph, placement, settings))
    transfers = settings.returned_micro_batches if sent else 0
    return sent / model.host_bandwidth + transfers * model.host_sync_seconds


def call_total(
    running: float, sending: float, settings: Settings, ipu: IPU, model: CycleModel
) -> tuple[float, float]:
    """Return the clock cycles that a call needs for the host, and those of the whole call.

    Args:
        running: The clock cycles of all micro-batches and weight updates of the call.
        sending: The seconds in which the IPUs send the outputs of the call to the host.
        settings: The options of the run, such as whether I/O tiles transfer data.
        ipu: The type of IPU.
        model: The constants for estimating clock cycles, such as the rate of the host.
    """
    sending *= ipu.clock
    if settings.overlaps_io:
        running, sending = max(running, sending), 0.0
    # The host also starts calls and waits for their end if all data is synthetic.
    call = ipu.clock * model.call_seconds + sending
    return call, running + call
