"""Writes the soak's table in docs/reliability.md: ``python -m tools.pages.soak_table RECORD``.

The record is that of ``make soak``: a line for every case. A case that was wrong at first was done
once more, alone, and that counts; both are told. What is not as expected is in bold.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.soak.record import last_attempts, whole_lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- soak table -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = (
    "| fault | cases | when | exit codes | time: median, worst of its limit | right first cause "
    "| left | resumed to the bit |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
_PHASES = ("start", "compile", "training", "checkpoint", "validation", "end")

Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """Return the table and the sentence above it, of all lines of a record.

    Raises:
        ValueError: it has no case.
    """
    draw, cases = lines[0], lines[1:]
    if not cases:
        raise ValueError("the record has no case")
    judged = sorted(last_attempts(cases), key=lambda line: line["number"])
    again = sum(line["attempt"] > 1 for line in judged)
    wrong = sum(bool(line["wrong"]) for line in judged)
    titles = [row.partition(" ")[2] for row in draw["rows"]]
    rows = [_row(title, [line for line in judged if line["row"] == title]) for title in titles]
    left_out = "".join(f" Left out: {title}: {why}." for title, why in draw["left_out"].items())
    return (
        f"{len(judged)} cases of seed {draw['seed']}, {len(titles)} kinds of fault: "
        f"{len(judged) - wrong} as expected, {again} of all only when they were done once more, "
        f"alone, {wrong} not even then.{left_out}\n\n{_HEAD}{''.join(rows)}"
    )


def _row(title: str, lines: Sequence[Line]) -> str:
    """Return the row of one kind of fault."""
    done = [line for line in lines if "code" in line]
    late = sum(line["missed"] for line in done)
    wrong = sum(bool(line["wrong"]) for line in lines)
    cells = (
        title,
        f"{len(lines)}" + (f" ({late} too late)" if late else ""),
        _counts((line["phase"] for line in done if not line["missed"]), _PHASES),
        _counts((line["code"] for line in done), ()),
        _times(done),
        _share(line["cause"] for line in done),
        str(sum(len(line["left"]) for line in done)),
        _share(line["resumed"] for line in done),
    )
    found = " | ".join(cells)
    return f"| {found}{f' **{wrong} wrong**' if wrong else ''} |\n"


def _counts(values: Iterable[object], order: Sequence[object]) -> str:
    """Return how often each value is there, in an order, else the most frequent first."""
    counts = Counter(values)
    first = {value: number for number, value in enumerate(order)}
    found = sorted(counts, key=lambda value: (first.get(value, len(first)), -counts[value]))
    return ", ".join(f"{value} ({counts[value]})" for value in found) or "-"


def _times(lines: Sequence[Line]) -> str:
    """Return times as they were; the load is told where one needed more than on an idle machine."""
    if not lines:
        return "-"
    worst = max(lines, key=lambda line: line["seconds"] / line["limit"])
    median = statistics.median(line["seconds"] for line in lines)
    over = worst["seconds"] > worst["limit"]
    load = f" at a load of {worst['load']:.1f}" if over else ""
    return f"{median:.1f} s, {worst['seconds']:.1f} of {worst['limit']:g} s{load}"


def _share(values: Iterable[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def main(record: str) -> None:
    """Write the table of a record into the page."""
    text = table(whole_lines(Path(record)))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.pages.soak_table RECORD")
    main(sys.argv[1])
