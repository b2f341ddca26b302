"""What the run's folder tells of a compiled model: its memory, schedule and time by the device.

Plain JSON, so that pages are drawn without this library. Nothing here computes any of it, or
decides what a model may need.
"""

from __future__ import annotations

from typing import Any, Final

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.memory import memory
from popdist_py.ipu.memory_report import IpuMemory
from popdist_py.ipu.schedule import Schedule, schedule
from popdist_py.ipu.searches import Run
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options
from popdist_py.run_files import device_file

__all__ = ["keep_device_document", "model_document"]

# Of a schedule, which repeats itself; more cells than these are no picture.
_MOST_STEPS: Final = 96
_MOST_CELLS: Final = 1024


def keep_device_document(run: Run | None, options: Options, name: str) -> None:
    """Leave in the run's folder what the model of the device says; instance 0 does.

    Args:
        run: what was compiled; None if the model of the device cannot be asked.
        options: of the run.
        name: of the user's module.
    """
    if run is None or options.Distributed.processId != 0 or not device_file.is_wanted():
        return
    try:
        is_named = options.Emulator.device_named is not None
        device_file.keep_model(model_document(run, name, is_named=is_named))
    except Exception:  # the program has no need of it
        logger.debug("The run's folder has nothing of the model on the device", exc_info=True)


def model_document(run: Run, name: str, *, is_named: bool) -> dict[str, Any]:
    """Return what the device's model says of a run, as what JSON knows.

    Bytes, cycles, seconds and shares between 0 and 1. Of a call's schedule there are the first
    steps: ``rows`` has for each IPU its cells, each ``[action, micro-batch, stage]``; ``cycles``
    has for each step the cycle of the pipeline that it is part of.

    Args:
        run: what the device's model is asked about.
        name: of the user's module.
        is_named: whether the program, or the launcher, named the device; else it is assumed.
    """
    placement, settings, ipu = run.placement, run.settings, run.ipu
    report = memory(run.graph, placement, settings, ipu, run.estimates)
    spent = cycles(run.graph, placement, settings, ipu, run.model)
    most = max(1, min(_MOST_STEPS, _MOST_CELLS // placement.num_ipus))
    steps = schedule(placement, settings, steps=most + 1)
    is_whole = len(steps.cycles) <= most
    first = Schedule(tuple(row[:most] for row in steps.rows), steps.cycles[:most])
    return {
        "name": name,
        "mode": "training" if settings.is_training else "inference",
        "device": {
            "name": ipu.name,
            "is_named": is_named,
            "tiles": ipu.tiles,
            "tile_bytes": ipu.tile_bytes,
            "clock": ipu.clock,
        },
        "replicas": settings.replicas,
        "stages": placement.num_stages,
        "memory": {"fits": report.fits, "ipus": [_memory(own) for own in report.ipus]},
        "schedule": {
            "is_whole": is_whole,
            "cycles": list(first.cycles),
            "rows": [
                [[cell.action, cell.micro_batch, cell.stage] for cell in row] for row in first.rows
            ],
            "svg": first.svg(),
        },
        "call": {
            "samples": spent.samples,
            "cycles": spent.total,
            "seconds": spent.seconds,
            "samples_per_second": spent.throughput,
            "busy": list(spent.busy),
        },
    }


def _memory(own: IpuMemory) -> dict[str, Any]:
    return {
        "ipu": own.ipu,
        "needed": own.needed,
        "capacity": own.capacity,
        "fullest_tile": max(own.fullest_tile, own.fullest_io_tile),
        "fits": own.fits,
        "by_category": dict(own.by_category()),
    }
