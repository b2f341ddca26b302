"""The display of an IPU schedule as a grid of letters or as an SVG picture.

In the grid, F stands for a forward pass, R for a recomputation, and B for a backward pass. In the
grid, U stands for a weight update, and E for an exchange of data. In the grid, X stands for a
forward pass and a backward pass of the same micro-batch on the last stage of a pipeline. In the
grid, the character ``.`` stands for an idle IPU. The digits behind a letter of the grid are the
number of the micro-batch. The module ``schedule_views`` does not compute schedules.
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
    """The action of one IPU in one step of a schedule.

    Attributes:
        step: The number of the step in the schedule, counted from 1.
        action: The action of the IPU in this step of the schedule, such as "forward". The action
            "exchange" is the all-reduce of gradients over the replicas, or a transfer from or to
            Streaming Memory between phases.
        micro_batch: The number of the micro-batch, counted from 1 over the whole call of the model;
            None for actions that do not belong to a micro-batch, such as a weight update.
        stage: The number of the pipeline stage or execution phase; None for actions that do not
            belong to a stage, such as a weight update.
    """

    step: int
    action: Action = "idle"
    micro_batch: int | None = None
    stage: int | None = None


class Drawn(Protocol):
    """The interface of IPU schedules that ``grid`` and ``svg`` can draw, such as ``Schedule``."""

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """For each IPU, a tuple with one cell (the IPU's action) per step."""

    @property
    def cycles(self) -> tuple[int, ...]:
        """For each step of the schedule, the number of its pipeline cycle."""


def grid(schedule: Drawn, *, by: Literal["step", "cycle"] = "step") -> str:
    """Return an IPU schedule as text, with a line per IPU and a column per step or cycle."""
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
    """Return an IPU schedule as SVG, with a row per IPU and a box per step of the schedule."""
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
