"""The cells of schedules, and pictures of them: letters in a grid for the terminal, and SVG.

F forward, R recomputation, B backward, X both on the last stage, U update, E exchange, a point for
nothing; the number is the micro-batch.
Nothing here decides what happens when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal, Protocol, TypeAlias

__all__ = ["Action", "Cell", "Drawn", "grid", "svg"]

Action: TypeAlias = Literal["forward", "recompute", "backward", "update", "exchange", "idle"]
_LETTERS: Final[dict[Action, str]] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "update": "U",
    "exchange": "E",
    "idle": ".",
}
_COLOURS: Final[dict[Action, str]] = {
    "forward": "#86efac",
    "recompute": "#fde68a",
    "backward": "#fca5a5",
    "update": "#93c5fd",
    "exchange": "#d8b4fe",
    "idle": "#f1f5f9",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 34, 28, 56, 28


@dataclass(frozen=True, slots=True)
class Cell:
    """What one IPU does in one step.

    Attributes:
        step: counted from 1.
        action: what it does. "exchange" is the all-reduce of replicas before an update, or
            Streaming Memory between phases.
        micro_batch: of which, counted from 1 over the whole call; None where none is meant.
        stage: of which stage or phase of the forward; None where none is meant.
    """

    step: int
    action: Action = "idle"
    micro_batch: int | None = None
    stage: int | None = None


class Drawn(Protocol):
    """What can be drawn: a ``Schedule``."""

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """For each IPU one cell for each step."""

    @property
    def cycles(self) -> tuple[int, ...]:
        """For each step the cycle that it is part of."""


def grid(schedule: Drawn, *, by: Literal["step", "cycle"] = "step") -> str:
    """Return a line for each IPU and a column for each step, or for each cycle of the pipeline."""
    columns = [[cell] for cell in range(len(schedule.cycles))]
    if by == "cycle":
        groups: dict[int, list[int]] = {}
        for step, cycle in enumerate(schedule.cycles):
            groups.setdefault(cycle, []).append(step)
        columns = list(groups.values())
    lines = [["", *(str(number + 1) for number in range(len(columns)))]]
    for ipu, row in enumerate(schedule.rows):
        texts = [_text([row[step] for step in column]) for column in columns]
        lines.append([f"IPU{ipu}", *texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def _text(cells: Sequence[Cell]) -> str:
    done = [cell for cell in cells if cell.action != "idle"]
    if [cell.action for cell in done] == ["forward", "backward"]:
        first, second = done
        if (first.micro_batch, first.stage) == (second.micro_batch, second.stage):
            return f"X{first.micro_batch}"
    return "".join(map(_label, done)) or "."


def _label(cell: Cell) -> str:
    return _LETTERS[cell.action] + ("" if cell.micro_batch is None else str(cell.micro_batch))


def svg(schedule: Drawn) -> str:
    """Return a picture with a row for each IPU and a box for each step; cycles have a line."""
    steps = len(schedule.cycles)
    width, height = _LEFT + steps * _WIDTH + 8, _TOP + len(schedule.rows) * _HEIGHT + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for step in range(steps):
        x = _LEFT + step * _WIDTH
        lines.append(f'<text x="{x + _WIDTH // 2}" y="18" fill="#475569">{step + 1}</text>')
        if step and schedule.cycles[step] != schedule.cycles[step - 1]:
            lines.append(
                f'<path d="M{x} {_TOP - 4} V{height - 4}" stroke="#475569" stroke-width="0.5"/>'
            )
    for ipu, row in enumerate(schedule.rows):
        y = _TOP + ipu * _HEIGHT
        lines.append(f'<text x="{_LEFT // 2}" y="{y + 18}" font-weight="bold">IPU{ipu}</text>')
        lines += [_box(cell, y) for cell in row]
    return "\n".join([*lines, "</svg>\n"])


def _box(cell: Cell, y: int) -> str:
    x = _LEFT + (cell.step - 1) * _WIDTH
    stage = "" if cell.stage is None else f", stage {cell.stage}"
    label = "" if cell.action == "idle" else escape(_label(cell))
    return (
        f"<g><title>step {cell.step}: {cell.action}{stage}</title>"
        f'<rect x="{x + 1}" y="{y + 1}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="3" '
        f'fill="{_COLOURS[cell.action]}"/>'
        f'<text x="{x + _WIDTH // 2}" y="{y + 18}">{label}</text></g>'
    )
