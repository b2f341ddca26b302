"""TEMPORARY: stands for the module of the reports until that is merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from popdist_py.ipu.what_if import Run

__all__ = ["ExecutionPage", "MemoryPage", "execution_page", "memory_page"]


@dataclass(frozen=True)
class MemoryPage:
    """Memory of a run."""

    run: Run

    def __str__(self) -> str:
        return f"memory: {self.run.fullest.needed:,} of {self.run.fullest.capacity:,} bytes"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"version": 1, "needed": self.run.fullest.needed}


@dataclass(frozen=True)
class ExecutionPage:
    """Time of a run."""

    run: Run

    def __str__(self) -> str:
        return f"cycles: {self.run.cycles:,}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"version": 1, "cycles": self.run.cycles}


def memory_page(run: Run) -> MemoryPage:
    """Return the memory of a run."""
    return MemoryPage(run)


def execution_page(run: Run) -> ExecutionPage:
    """Return the time of a run."""
    return ExecutionPage(run)
