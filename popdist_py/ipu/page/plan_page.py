"""The HTML page about a model on IPUs, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.errors import counted
from popdist_py.html_pages.page import Badge, Section, page
from popdist_py.ipu.memory_contents import Verdict
from popdist_py.ipu.page.comparison_section import comparison_section
from popdist_py.ipu.page.execution_sections import (
    execution_section,
    operations_section,
    time_by_kind,
)
from popdist_py.ipu.page.liveness_section import liveness_section
from popdist_py.ipu.page.memory_sections import memory_section
from popdist_py.ipu.page.saved_reports import SavedReports, saved_reports
from popdist_py.ipu.page.search_section import search_section
from popdist_py.ipu.page.summary_sections import (
    insights_section,
    opening_facts,
    summary_section,
)
from popdist_py.ipu.page.what_if_section import what_if_section
from popdist_py.ipu.reports import ExecutionPage, MemoryPage
from popdist_py.ipu.searches import Run
from popdist_py.ipu.searches.search_answers import Answer

__all__ = ["Planned", "plan_page", "write_plan_page"]

# The version of the JSON of ``--json``. The version is increased when a key is removed or gets
# another meaning.
_VERSION: Final = 2
_BADGES: Final[Mapping[Verdict, Badge]] = {
    "fits": Badge("Fits", "good"),
    "close": Badge("Close to the limit", "half"),
    "does not fit": Badge("Does not fit", "bad"),
}
_FOOTER: Final = (
    "All figures are estimates of a model of the device. Nothing was run on an IPU. One MB is a "
    "million bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A model with its configuration and its reports, as a page shows them.

    Attributes:
        name: The name of the model, which is the title of the page.
        run: The configuration (graph, placement, settings and IPU).
        memory: The report about memory of ``run``.
        execution: The report about time of ``run``.
        options: The options that the user gave, with their values.
        answer: The result of the search that found ``run``; None without a search.
    """

    name: str
    run: Run
    memory: MemoryPage
    execution: ExecutionPage
    options: Mapping[str, str] = field(default_factory=dict)
    answer: Answer | None = None

    def to_json(self) -> dict[str, Any]:
        """Return both reports, the name of the model, and the given options as JSON values."""
        return {
            "version": _VERSION,
            "model": self.name,
            "options": dict(self.options),
            "fits": self.memory.fits,
            "verdict": self.memory.verdict,
            "memory": self.memory.to_json(),
            "execution": self.execution.to_json(),
            "cycles_by_kind": _cycles_by_kind(self.execution),
        }


def _cycles_by_kind(execution: ExecutionPage) -> list[dict[str, Any]]:
    times = zip(execution.ipus, time_by_kind(execution), strict=True)
    return [
        {"ipu": own.ipu, "cycles": {kind: round(size) for kind, size in cycles.items()}}
        for own, cycles in times
    ]


def write_plan_page(path: Path, planned: Planned, beside: SavedReports | None = None) -> None:
    """Write the page of a planned run to a file, atomically; only its owner can read the file.

    ``beside`` are other reports with which the page compares those of the run.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(path, plan_page(planned, beside) + "\n")


def plan_page(planned: Planned, beside: SavedReports | None = None) -> str:
    """Return the HTML page of a planned run, compared with the reports ``beside`` if given."""
    run, memory, execution = planned.run, planned.memory, planned.execution
    sections: list[Section] = [
        summary_section(run, planned.options),
        insights_section(memory),
        memory_section(memory, execution, run.estimates.grain),
        liveness_section(run, memory),
        operations_section(run),
        execution_section(run, execution),
        what_if_section(run),
    ]
    if beside is not None:
        this = saved_reports(planned.to_json(), planned.name)
        sections.insert(0, comparison_section(this, beside))
    if planned.answer is not None:
        sections.insert(0, search_section(planned.answer))
    where = counted(run.placement.num_ipus, f"{run.ipu.name} IPU")
    mode = "training" if run.settings.is_training else "inference"
    return page(
        planned.name,
        sections,
        lead=f"on {where} of a replica, {mode}",
        badge=_BADGES[memory.verdict],
        opening=[opening_facts(run, memory, execution)],
        footer=_FOOTER,
    )
