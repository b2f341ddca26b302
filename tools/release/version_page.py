"""The results of the version cases that are kept, and the table that a page makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = _DOCS / "compatibility.json"
PAGE = _DOCS / "compatibility.md"
_VERSIONS = {"torch": "torch", "numpy": "NumPy", "mpi4py": "mpi4py", "click": "click"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of one case: the versions that ran, and how many tests did what."""

    case: str
    date: str
    python: str
    mpi: str
    versions: dict[str, str]
    tests: tuple[str, ...]
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: int


def read_results() -> list[Outcome]:
    """Return the results that are kept, in the order of their cases."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return [Outcome(**{**one, "tests": tuple(one["tests"]), "failed": tuple(one["failed"])})
            for one in kept]  # fmt: skip


def write_results(outcomes: Iterable[Outcome]) -> None:
    """Keep the outcomes, each instead of an older one of its case."""
    kept = {outcome.case: outcome for outcome in (*read_results(), *outcomes)}
    values = [asdict(kept[case]) for case in sorted(kept)]
    RESULTS.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def with_tables(page: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page with the table of ``outcomes`` between its marks."""
    before, mark, rest = page.partition("<!-- results -->\n")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}{mark}{table(outcomes)}<!-- end -->{after}"


def files() -> dict[Path, str]:
    """Return the page that the kept results make."""
    return {PAGE: with_tables(PAGE.read_text(encoding="utf-8"), read_results())}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    head = ("Python", *_VERSIONS.values(), "MPI", "tests", "passed", "skipped", "failed", "day")
    return "".join(_row(cells) for cells in (head, ("---",) * len(head), *map(_cells, outcomes)))


def _cells(one: Outcome) -> tuple[object, ...]:
    versions = (one.versions.get(name, "none") for name in _VERSIONS)
    rooms = ", ".join(f"`{name}`" for name in one.tests)
    counts = (one.passed, one.skipped, len(one.failed))
    return (one.python, *versions, one.mpi, rooms, *counts, one.date)


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"
