"""The texts that docs/why-slow.md promises for each cause of a slow job."""

from __future__ import annotations

import gzip
import html
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"
# The section of the guide for each cause of benchmarks/slow_job.py.
SECTIONS = {
    "loader": "Slow loader",
    "uneven": "Uneven data",
    "own-code": "One slow instance",
    "cores": "Shared cores",
    "link": "Slow link",
    "batches": "Small batches",
    "saving": "Checkpoints",
    "compile": "Compiling",
}


@dataclass(frozen=True)
class Promised:
    """The texts that the guide quotes, by the tool that shows them."""

    live: tuple[str, ...]
    report: tuple[str, ...]
    timeline: tuple[str, ...]


def promised_texts(cause: str) -> Promised:
    """Return the texts of a cause's row in the guide's table."""
    guide = (ROOT / "docs" / "why-slow.md").read_text(encoding="utf-8")
    begin = f"| [{SECTIONS[cause]}]("
    row = next(line for line in guide.splitlines() if line.startswith(begin))
    cells = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in row.strip("|").split("|")]
    assert f"\n## {SECTIONS[cause]}\n" in guide
    return Promised(*cells[1:4])


def missing_texts(cause: str, stderr: str, run: Path) -> list[str]:
    """Return the promised texts that a job's stderr, its page and its timeline do not have."""
    promised = promised_texts(cause)
    page = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    with gzip.open(run / "timeline.json.gz", "rt", encoding="utf-8") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    missing = [f"--live: {text}" for text in promised.live if text not in stderr]
    missing += [f"report: {text}" for text in promised.report if text not in page]
    return missing + [f"timeline: {text}" for text in promised.timeline if text not in names]


def slow_jobs():
    """Return the module of the benchmark that makes jobs slow."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    import slow_jobs

    return slow_jobs
