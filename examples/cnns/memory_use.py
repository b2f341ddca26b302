"""Memory utilisation for Weights & Biases: of the modelled IPUs, and of the hosts.

Names and units are those of the table in docs/cnns.md. Nothing here writes a log.
"""

from __future__ import annotations

import psutil

from popdist_py import poptorch

__all__ = ["REDUCTIONS", "of_host", "of_ipus"]

#: How the numbers of all instances become one; that of the IPUs is instance 0's, all are alike.
REDUCTIONS = {
    "memory/ipu_percent": "last",
    "memory/ipu_bytes": "last",
    "memory/host_percent": "max",
    "memory/host_bytes": "sum",
}


def of_ipus(model: poptorch.PoplarExecutor) -> dict[str, float]:
    """Return what the model of the device says of the fullest IPU of a compiled model.

    Nothing where there is no graph of it.
    """
    try:
        page = model.memoryReport()
    except poptorch.Error:
        return {}
    # A tile without room makes a program impossible: the fullest one says how close it is.
    by_tile = {max(ipu.fullest_tile, ipu.fullest_io_tile): ipu for ipu in page.ipus}
    fullest = max(by_tile)
    return {
        "memory/ipu_percent": 100 * fullest / page.tile_bytes,
        "memory/ipu_bytes": by_tile[fullest].needed,
    }


def of_host() -> dict[str, float]:
    """Return the memory of this process, and how full this host's memory is."""
    return {
        "memory/host_percent": psutil.virtual_memory().percent,
        "memory/host_bytes": psutil.Process().memory_info().rss,
    }
