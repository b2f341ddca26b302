"""Memory utilisation of the modelled IPUs and of the hosts, as metrics for Weights & Biases.

docs/cnns.md has a table of the names and units.
"""

from __future__ import annotations

import psutil

from popdist_py import poptorch

__all__ = ["REDUCTIONS", "of_host", "of_ipus"]

#: The reduction of each metric over the instances. The memory of the IPUs is the same on all
#: instances.
REDUCTIONS = {
    "memory/ipu_percent": "last",
    "memory/ipu_bytes": "last",
    "memory/host_percent": "max",
    "memory/host_bytes": "sum",
}


def of_ipus(model: poptorch.PoplarExecutor) -> dict[str, float]:
    """Return the modelled memory of the fullest IPU of a compiled model.

    The result is empty if no graph can be made of the model's forward.
    """
    try:
        page = model.memoryReport()
    except poptorch.Error:
        return {}
    # A program fits an IPU only if it fits every tile, so the fullest tile shows how much memory is
    # left.
    by_tile = {max(ipu.fullest_tile, ipu.fullest_io_tile): ipu for ipu in page.ipus}
    fullest = max(by_tile)
    return {
        "memory/ipu_percent": 100 * fullest / page.tile_bytes,
        "memory/ipu_bytes": by_tile[fullest].needed,
    }


def of_host() -> dict[str, float]:
    """Return the memory of this process, and the share of this host's memory that is in use."""
    return {
        "memory/host_percent": psutil.virtual_memory().percent,
        "memory/host_bytes": psutil.Process().memory_info().rss,
    }
