"""The memory, schedule and time that a model would need on IPUs, as JSON values.

Programs that do not use this library can display the JSON values. The module ``device_document``
does not write files.
"""

from __future__ import annotations

from typing import Any, Final

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.memory import memory
from popdist_py.ipu.memory_contents import UNCERTAINTY, IpuMemory
from popdist_py.ipu.schedule import Schedule, schedule
from popdist_py.ipu.searches import Run

__all__ = ["model_document"]

# The largest numbers of steps and of cells (an IPU's action in a step) of a schedule in the JSON
# values. More steps are not stored, because a schedule repeats the same steps and a larger picture
# would not be readable.
_MOST_STEPS: Final = 96
_MOST_CELLS: Final = 1024


def model_document(run: Run, name: str, *, is_named: bool) -> dict[str, Any]:
    """Return a model's memory, schedule and time on IPUs, as a dictionary for JSON.

    The values in the dictionary are bytes, clock cycles, seconds, and shares between 0 and 1. The
    entry ``schedule`` contains the first steps of a call of the model. The entry ``rows`` of the
    schedule contains one list of cells for each IPU. A cell (the action of an IPU in one step) is a
    list ``[action, micro-batch, stage]``. The entry ``cycles`` of the schedule contains the number
    of the pipeline cycle of each step.

    Args:
        run: The model's graph and the options of the run, which determine the model's memory and
            time.
        name: The name of the user's ``torch.nn.Module``.
        is_named: Whether the program, the launcher or the environment names a type of IPU. If the
            user does not name a type of IPU, the estimates are for the default type.
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
        "memory": {
            "fits": report.fits,
            "verdict": report.verdict,
            "share": report.share,
            "uncertainty": UNCERTAINTY,
            "ipus": [_memory(own) for own in report.ipus],
        },
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
        "verdict": own.verdict,
        "share": own.share,
        "by_category": dict(own.by_category()),
    }
