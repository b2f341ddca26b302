"""How speed grows with the instances, as lines for a terminal: a table with bars.

Pure: comparisons in, text out. Nothing here compares.
"""

from __future__ import annotations

from poprun_py.past_runs.comparison import SECONDS, STEPS, Comparison
from poprun_py.past_runs.comparison_table import (
    MEASURED_BY,
    SCALINGS,
    bar,
    bar_length,
    factor,
    milliseconds,
    percent,
)
from poprun_py.past_runs.scaling import ideal_speedup
from poprun_py.text_tables import Column, fitted_table, rich_lines
from poprun_py.texts import number_text


def scaling_lines(
    comparison: Comparison, *, width: int, colour: bool = False, blocks: bool = True
) -> list[str]:
    """Return the table of a scaling, a row for each count of instances, and what it is by.

    Args:
        comparison: of the repetitions of each count, grouped.
        width: of the lines, in columns; columns of the table that do not fit are left out.
        colour: whether the bars have one.
        blocks: whether bars may be of block characters.
    """
    columns = scaling_columns(comparison, bars=bar_length(width), blocks=blocks)
    return [
        *rich_lines(fitted_table(columns, width=width), width=max(width, 20), colour=colour),
        "",
        f"median of each count, by {MEASURED_BY[comparison.measure]}",
        *([SCALINGS[comparison.scaling]] if comparison.scaling else []),
        *(f"note: {remark}" for remark in comparison.remarks),
    ]


def scaling_columns(comparison: Comparison, *, bars: int = 0, blocks: bool = True) -> list[Column]:
    """Return the columns of the table of a scaling, with bars of so many signs."""
    entries = comparison.entries
    by_seconds = comparison.measure == SECONDS
    medians = [each.speed.median if each.speed else None for each in entries]
    shown = [each.numbers.get("seconds") if by_seconds else each.speed for each in entries]
    title = "seconds" if by_seconds else comparison.measure
    if comparison.measure == STEPS:
        # Speeds are replicas times steps; people know the steps.
        title = "replica steps/s"
    columns = [
        Column("instances", tuple(str(each.instances) for each in entries)),
        Column("replicas", tuple(str(each.replicas) for each in entries), 3),
        Column("runs", tuple(str(len(each.runs)) for each in entries), 1),
        Column(title, tuple("-" if each is None else number_text(each.median) for each in shown)),
        Column(
            "min-max",
            tuple(
                "-" if each is None else f"{number_text(each.least)}-{number_text(each.most)}"
                for each in shown
            ),
            4,
        ),
        Column("speedup", tuple(factor(each.speedup) for each in entries)),
        Column("ideal", tuple(factor(ideal_speedup(comparison, each)) for each in entries), 6),
        Column("efficiency", tuple(percent(each.efficiency) for each in entries)),
    ]
    if not by_seconds:
        steps = [each.numbers.get("step_seconds") for each in entries]
        cells = tuple("-" if each is None else milliseconds(each.median) for each in steps)
        columns.append(Column("step ms", cells, 2))
    if bars:
        drawn = tuple(bar(speed, medians, bars, blocks=blocks) for speed in medians)
        columns.append(Column("speed", drawn, 5, is_text=True, style="cyan"))
    return columns
