"""Processes that tools and tests start: the living ones, and a clean environment for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LEASES", "surrounding_variables", "survivors", "wait_until"]

LEASES = "POPRUN_LEASES"
_PREFIXES = ("POPDIST_", "POPRUN_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "POPLAR_", "IPUOF_",
             "POPTORCH_", "TORCHELASTIC_")  # fmt: skip
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK",
          "ROLE_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NO_COLOR",
          # That of the workers of the tests, to which older progress bars would keep.
          "COLUMNS", "LINES")  # fmt: skip


def surrounding_variables() -> list[str]:
    """Return the variables of this process that a surrounding job or shell may have set."""
    return [
        name
        for name in os.environ
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != LEASES
    ]


def survivors(marker: str) -> list[int]:
    """Return the pids of living processes whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in (b"Z", b"X") and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(
    condition: Callable[[], object],
    limit: float = 30.0,
    message: str = "the condition did not come true",
) -> None:
    """Poll ``condition`` until it holds.

    Raises:
        TimeoutError: it did not within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{message} within {limit} s")
        time.sleep(0.01)
