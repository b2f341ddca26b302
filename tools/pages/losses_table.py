"""Writes the table of losses in docs/reliability.md: ``python -m tools.pages.losses_table RECORD``.

The record is that of ``python -m tools.soak.repeated_losses --json RECORD``. Further records of
other programs (``--program ddp``) may follow; each record has rows of its own.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.soak.record import whole_lines
from tools.soak.repeated_losses import LOSSES, NUM_HOSTS, shares

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- losses table -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = (
    "| loss | number of losses | time to next step: median, longest | repeated steps, at most | "
    "equal weights |\n"
    "| --- | --- | --- | --- | --- |\n"
)
_NAMES = {"poptorch": "PopTorch", "ddp": "DDP"}

Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """Return the table of a record, and the sentences above it.

    Raises:
        ValueError: The record has no losses, or its weights were not compared yet.
    """
    draw, rest = lines[0], list(lines[1:])
    losses = [line for line in rest if line["line"] == "loss"]
    compared = [line for line in rest if line["line"] == "digests"]
    if not losses or not compared:
        raise ValueError("the record has no losses, or the run has not been compared yet")
    parts = [line for line in rest if line["line"] == "part"]
    minutes = sum(part["seconds"] for part in parts) / 60
    steps = sum(part["steps"] for part in parts)
    median = next(line["seconds"] for line in rest if line["line"] == "median")
    wrong = compared[-1]["wrong"]
    instances = draw["per_host"] * NUM_HOSTS
    verdict = (
        "ends with the weights of the undisturbed training, bit for bit"
        if compared[-1]["equal"]
        else f"**ends with other weights than the undisturbed training, from step {wrong[:1]} on**"
    )
    training, undisturbed = (f"{100 * each:.0f} %" for each in shares(rest))
    text = (
        f"A {_NAMES[draw['program']]} program with {instances} instances on {NUM_HOSTS} hosts "
        f"(seed {draw['seed']}) had {len(losses)} losses in {minutes:.1f} minutes and {steps} "
        f"steps of {1000 * median:.0f} ms, at a load of {parts[-1]['load']} on "
        f"{parts[-1]['cores']} cores. The job spent {training} of the time in training, and the "
        f"training {verdict}. Without losses and without states in memory, the same steps would "
        f"have taken {undisturbed} of the time.\n\n"
    )
    rows = [_row(kind.title, losses, wrong) for kind in LOSSES]
    return f"{text}{_HEAD}{''.join(rows)}"


def _row(kind: str, losses: Sequence[Line], wrong: Sequence[int]) -> str:
    """Return the row of one kind of loss; a kind that was not drawn has none."""
    found = [line for line in losses if line["kind"] == kind]
    if not found:
        return ""
    seconds = [line["seconds"] for line in found]
    times = f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s"
    again = max(line["again"] for line in found)
    return f"| {kind} | {len(found)} | {times} | {again} | {'**no**' if wrong else 'yes'} |\n"


def main(records: Sequence[str]) -> None:
    """Write the tables of the records into the page."""
    text = "\n".join(table(whole_lines(Path(record))) for record in records)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tools.pages.losses_table RECORD...")
    main(sys.argv[1:])
