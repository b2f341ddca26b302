"""The report about the time that one call of a model takes on IPUs.

The package ``ipu`` computes the figures in the tables of the report.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from popdist_py.errors import counted
from popdist_py.ipu.cycles import CycleReport, cycles
from popdist_py.ipu.documents.document import Cell, Column, Document, Section, Share
from popdist_py.ipu.documents.report import Report
from popdist_py.ipu.reports.tile_balance import tile_balance
from popdist_py.ipu.schedule import Schedule, schedule, window_idle_share
from popdist_py.ipu.schedule_views import grid
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.stage_cycles import StageCycles, operation_cycles
from popdist_py.ipu.transfers import copied_bytes, host_traffic, request_bytes

__all__ = ["ExecutionPage", "IpuExecution", "OperationCycles", "execution_page"]

# The version of the report's JSON format. The version is increased when a key is removed or gets
# another meaning.
_VERSION: Final = 1
_SLOWEST: Final = 8
_STEPS: Final = 24
_GRID_WIDTH: Final = 98
_STAGE_PARTS: Final = (
    *("forward", "recompute", "backward", "receive", "copy", "load", "update", "all_reduce"),
)

Pass: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class IpuExecution:
    """The work and the data transfers of one IPU in one call of the model.

    Attributes:
        ipu: The number of the IPU in its replica.
        busy: The time that the IPU spends on computing, divided by the duration of the call.
        tile_balance: The mean work of the IPU's tiles, divided by the work of the busiest tile.
        received: The bytes that the IPU receives from the host.
        sent: The bytes that the IPU sends to the host in one call of the model. ``sent`` counts
            outputs of the model, and the requests that tiles send for each transfer from or to the
            host.
        copied: The bytes of activations that the IPU sends to other IPUs. The gradients that the
            other IPUs send back in training are not counted.
    """

    ipu: int
    busy: float
    tile_balance: float
    received: int
    sent: int
    copied: int


@dataclass(frozen=True, slots=True)
class OperationCycles:
    """The clock cycles of one pass (forward or backward) of an operation for one micro-batch.

    Attributes:
        name: The name of the operation, such as ``layer1.0.conv1``.
        direction: The pass of the operation, which is the word "forward" or "backward".
        stage: The number of the pipeline stage that contains the operation.
        cycles: The number of clock cycles that this pass of the operation takes.
        share: The clock cycles of this pass of the operation, divided by the clock cycles of all
            passes of all operations.
    """

    name: str
    direction: Pass
    stage: int
    cycles: int
    share: float


@dataclass(frozen=True, slots=True)
class ExecutionPage(Report):
    """The report about the time that one call of the model takes.

    Attributes:
        device: The name of the type of IPU, such as "mk2".
        batch: The number of samples in a micro-batch.
        settings: The options of the run, such as the number of replicas.
        report: The clock cycles of the call and of each pipeline stage.
        stage_ipus: The number of the IPU that runs each stage.
        ipus: The work and the data transfers of each IPU in one call of the model.
        imbalance: The work of the slowest pipeline stage, divided by the mean work of all stages.
        idle_share: Between two weight updates, the share of the schedule's steps in which an IPU is
            idle. For ``idle_share``, all steps of the schedule are counted as equally long.
        slowest: The forward or backward passes of operations that take the most clock cycles, with
            the slowest pass first.
        beginning: The first steps of the schedule, which gives the action of each IPU in each step.
    """

    device: str
    batch: int
    settings: Settings
    report: CycleReport
    stage_ipus: tuple[int, ...]
    ipus: tuple[IpuExecution, ...]
    imbalance: float
    idle_share: float
    slowest: tuple[OperationCycles, ...]
    beginning: Schedule

    def document(self) -> Document:
        """Return the headline and tables that display this report."""
        own = self.report
        headline = (
            f"Execution: {own.throughput:,.1f} samples/s, {_duration(own.seconds)} a call "
            f"({own.total:,} cycles at {own.clock / 1e9:g} GHz)"
        )
        return Document(
            headline,
            True,
            (self._call(), self._stages(), self._ipus(), self._slowest(), self._grid()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON values.

        The figures in the dictionary are clock cycles, bytes, seconds, and shares between 0 and 1.
        """
        own = self.report
        return {
            "version": _VERSION,
            "report": "execution",
            "device": self.device,
            "clock": own.clock,
            "samples": own.samples,
            "cycles": own.total,
            "cycles_between_updates": own.window,
            "cycles_beside": own.call,
            "seconds": own.seconds,
            "samples_per_second": own.throughput,
            "stage_imbalance": self.imbalance,
            "idle_share": self.idle_share,
            "stages": [
                {"stage": index, "ipu": ipu, **{name: round(value) for name, value in parts}}
                for index, (ipu, parts) in enumerate(
                    zip(self.stage_ipus, map(_parts, own.stages), strict=True)
                )
            ],
            "ipus": [asdict(one) for one in self.ipus],
            "slowest": [asdict(one) for one in self.slowest],
            "schedule": [
                [[cell.action, cell.micro_batch, cell.stage] for cell in row]
                for row in self.beginning.rows
            ],
        }

    def _call(self) -> Section:
        settings, own = self.settings, self.report
        times = {
            "samples": self.batch,
            "accumulation": settings.accumulation,
            "device iterations": settings.device_iterations,
            "replicas": settings.replicas,
        }
        product = " x ".join(f"{number:,} ({name})" for name, number in times.items())
        part = "from update to update" if settings.is_training else "for its micro-batches"
        notes = (
            f"{counted(own.samples, 'sample', ',')} = {product}",
            f"{own.window:,} cycles {part}, {own.call:,} more of each call (host)",
            f"Slowest stage over the mean one: {self.imbalance:.2f}. "
            f"Idle steps of the schedule: {Share(self.idle_share)}",
        )
        return Section("Call", notes=notes)

    def _stages(self) -> Section:
        parts = [dict(_parts(stage)) for stage in self.report.stages]
        happens = {"load": self.settings.is_phased, "update": self.settings.is_training}
        shown = [
            name
            for name in _STAGE_PARTS
            if happens.get(name, True) and any(round(one[name]) for one in parts)
        ]
        columns = ("stage", "IPU", *(_TITLES.get(name, name) for name in shown))
        rows = tuple(
            (str(index), str(ipu), *(f"{one[name]:,.0f}" for name in shown))
            for index, (ipu, one) in enumerate(zip(self.stage_ipus, parts, strict=True))
        )
        title = "Stages (cycles of a micro-batch, all-reduce and update: of an update)"
        return Section(title, tuple(map(Column, columns)), rows)

    def _ipus(self) -> Section:
        moved = ("from the host", "to the host", "to other IPUs")
        names = ("IPU", "busy", "idle", "tile balance", *moved)
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                str(one.ipu),
                Share(one.busy),
                str(Share(1 - one.busy)),
                f"{one.tile_balance:.2%}",
                *(f"{size / 1e6:,.3f}" for size in (one.received, one.sent, one.copied)),
            )
            for one in self.ipus
        )
        return Section("IPUs (MB of a call)", tuple(map(Column, names)), rows)

    def _slowest(self) -> Section:
        columns = (
            *(Column("cycles"), Column("share"), Column("stage")),
            *(Column("pass", True), Column("operation", True)),
        )
        rows = tuple(
            (f"{one.cycles:,}", str(Share(one.share)), str(one.stage), one.direction, one.name)
            for one in self.slowest
        )
        return Section("Slowest operations (of a micro-batch)", columns, rows)

    def _grid(self) -> Section:
        count = len(self.beginning.cycles)
        drawn = grid(self.beginning)
        while count > 1 and max(map(len, drawn.splitlines())) > _GRID_WIDTH:
            count -= 1
            first = tuple(row[:count] for row in self.beginning.rows)
            drawn = grid(Schedule(first, self.beginning.cycles[:count]))
        key = "F forward, R recomputation, B backward, U update, E exchange, with its micro-batch"
        return Section("First steps of the schedule", notes=(drawn.rstrip("\n"), key))


_TITLES: Final = {
    "receive": "from host",
    "copy": "to IPUs",
    "load": "streaming",
    "all_reduce": "all-reduce",
}


def execution_page(run: Run) -> ExecutionPage:
    """Return the report about the time of one call of a model, even if memory is too small."""
    graph, placement, settings = run.graph, run.placement, run.settings
    report = cycles(graph, placement, settings, run.ipu, run.model)
    copied = [0] * placement.num_ipus
    for stage, ipu in enumerate(placement.ipus):
        copied[ipu] += settings.micro_batches * copied_bytes(graph, placement, stage)
    balances = tile_balance(graph, placement, settings, run.ipu, run.model, run.estimates.grain)
    traffic = zip(
        host_traffic(graph, placement, settings),
        request_bytes(graph, placement, settings, run.ipu),
        strict=True,
    )
    work = [stage.work for stage in report.stages]
    return ExecutionPage(
        device=run.ipu.name,
        batch=graph.batch,
        settings=settings,
        report=report,
        stage_ipus=placement.ipus,
        ipus=tuple(
            IpuExecution(
                ipu=ipu,
                busy=report.busy[ipu],
                tile_balance=balances[ipu],
                received=own.received,
                sent=own.sent + requests,
                copied=copied[ipu],
            )
            for ipu, (own, requests) in enumerate(traffic)
        ),
        imbalance=max(work) * len(work) / sum(work) if any(work) else 1.0,
        idle_share=window_idle_share(placement, settings),
        slowest=_slowest(run),
        beginning=schedule(placement, settings, steps=_STEPS),
    )


def _slowest(run: Run) -> tuple[OperationCycles, ...]:
    passes = operation_cycles(run.graph, run.placement, run.settings, run.ipu, run.model)
    total = sum(map(sum, passes)) or 1.0
    directions: tuple[Pass, Pass] = ("forward", "backward")
    found = [
        OperationCycles(operation.name, direction, stage, round(taken), taken / total)
        for direction, times in zip(directions, passes, strict=True)
        for operation, stage, taken in zip(
            run.graph.operations, run.placement.stages, times, strict=True
        )
    ]
    ordered = sorted(found, key=lambda one: (-one.cycles, one.name, one.direction))
    return tuple(one for one in ordered[:_SLOWEST] if one.cycles)


def _parts(stage: StageCycles) -> list[tuple[str, float]]:
    return [(name, getattr(stage, name)) for name in _STAGE_PARTS]


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
