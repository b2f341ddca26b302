"""The results of the version cases, as rows of a table in docs/releasing.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "releasing.md"
_BEGIN, _END = "<!-- results -->\n", "<!-- end -->"
_VERSIONS = ("torch", "numpy", "mpi4py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one case: the versions that ran, and how many tests passed."""

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


def with_row(page: str, outcome: Outcome) -> str:
    """Return the page with the row of ``outcome`` in place of an older row of its case."""
    before, _, rest = page.partition(_BEGIN)
    table, _, after = rest.partition(_END)
    head, line, *rows = table.splitlines(keepends=True)
    kept = [row for row in rows if not row.startswith(f"| `{outcome.case}` |")]
    rows = sorted([*kept, _row(outcome)])
    return "".join((before, _BEGIN, head, line, *rows, _END, after))


def _row(outcome: Outcome) -> str:
    cells = (
        f"`{outcome.case}`",
        outcome.python,
        *(outcome.versions.get(name, "none") for name in _VERSIONS),
        outcome.mpi,
        ", ".join(f"`{name}`" for name in outcome.tests),
        outcome.passed,
        len(outcome.failed),
        outcome.date,
    )
    return f"| {' | '.join(map(str, cells))} |\n"
