"""A comparison of runs as lines for a terminal: a table with bars, and what is to be said of it.

Pure: comparisons in, text out. rich is imported on use. Nothing here compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from poprun_py.past_runs.comparison import SAMPLES, SECONDS, STEPS, Comparison, Entry, Spread
from poprun_py.text_tables import Column, fitted_table, rich_lines
from poprun_py.texts import number_text

#: Bars of a wide screen, and of a narrow one, which has fewer columns than that.
_LONG, _SHORT, _WIDE = 20, 10, 120
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_TITLES: Final[Mapping[str, str]] = {
    "samples_per_second": "samples/s",
    "batch": "global batch",
    "step_seconds": "step ms",
    "p95_seconds": "p95 ms",
    "seconds": "seconds",
    "loss": "loss",
}
#: What speeds are compared by, in words.
MEASURED_BY: Final[Mapping[str, str]] = {
    SAMPLES: "samples per second of all instances, without the first steps of each",
    STEPS: (
        "steps per second; the samples of a step are not known, as many per replica are assumed"
    ),
    SECONDS: "the seconds of the whole run, as if each did the same work; no run counts steps",
}
#: Which scaling it is, in words.
SCALINGS: Final[Mapping[str, str]] = {
    "strong": "strong scaling: the global batch is the same",
    "weak": "weak scaling: the global batch grows with the run",
}


def comparison_lines(
    comparison: Comparison, *, width: int, colour: bool = False, blocks: bool = True
) -> list[str]:
    """Return the table of a comparison, what it is by, and what numbers are missing and why.

    Args:
        comparison: of at least one run.
        width: of the lines, in columns; columns of the table that do not fit are left out.
        colour: whether the bars have one.
        blocks: whether bars may be of block characters.
    """
    told = [f"compared with {comparison.base.label} by {MEASURED_BY[comparison.measure]}"]
    if comparison.scaling:
        told.append(SCALINGS[comparison.scaling])
    columns = comparison_columns(comparison, bars=bar_length(width), blocks=blocks)
    return [
        *rich_lines(fitted_table(columns, width=width), width=max(width, 20), colour=colour),
        "",
        *told,
        *_missing_lines(comparison),
        *(f"note: {remark}" for remark in comparison.remarks),
    ]


def comparison_columns(
    comparison: Comparison, *, bars: int = 0, blocks: bool = True
) -> list[Column]:
    """Return the columns that tell something, with bars of so many signs."""
    entries = comparison.entries
    counts_vary = len({each.instances for each in entries}) > 1
    replicas_vary = len({each.replicas for each in entries}) > 1
    in_step = all(each.efficiency == each.efficiency_by_replicas for each in entries)
    has_hosts = any(len(each.runs[0].hosts) > 1 for each in entries)
    speeds = [each.speed.median if each.speed else None for each in entries]

    def column(title: str, cell: Callable[[Entry], str], drop_order: int = 0) -> Column:
        return Column(title, tuple(cell(each) for each in entries), drop_order)

    def numbers(name: str, drop_order: int, show: Callable[[float], str], title: str) -> Column:
        return column(title, lambda each: _cell(each.numbers.get(name), show), drop_order)

    columns = [Column("run", tuple(each.label for each in entries), is_text=True, breaks=True)]
    columns.append(column("instances", lambda each: str(each.instances)))
    if any(each.replicas != each.instances for each in entries):
        columns.append(column("replicas", lambda each: str(each.replicas), 3))
    if has_hosts:
        columns.append(column("hosts", lambda each: str(len(each.runs[0].hosts)), 2))
    columns.append(numbers("samples_per_second", 0, number_text, _TITLES["samples_per_second"]))
    columns.append(column("speedup", lambda each: factor(each.speedup)))
    if counts_vary:
        columns.append(column("efficiency", lambda each: percent(each.efficiency), 9))
    if replicas_vary and not in_step:
        columns.append(column("by replicas", _by_replicas, 6))
    columns += [
        numbers("step_seconds", 4, milliseconds, _TITLES["step_seconds"]),
        numbers("p95_seconds", 1, milliseconds, _TITLES["p95_seconds"]),
        numbers("seconds", 7, number_text, _TITLES["seconds"]),
        numbers("loss", 8, number_text, _TITLES["loss"]),
    ]
    if comparison.target is not None:
        columns.append(numbers("reached", 0, number_text, f"s to {comparison.target}"))
    drawn = tuple(bar(speed, speeds, bars, blocks=blocks) for speed in speeds)
    columns.append(Column("speed", drawn, 5, is_text=True, style="cyan"))
    return [each for each in columns if set(each.cells) - {"-", ""}]


def _by_replicas(entry: Entry) -> str:
    return percent(entry.efficiency_by_replicas)


def _missing_lines(comparison: Comparison) -> list[str]:
    """Return which numbers are not there, and why."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for entry in comparison.entries:
        for name, why in entry.missing.items():
            if name != "batch":
                title = _TITLES.get(name, f"time to {comparison.target}")
                by_reason.setdefault(why, {}).setdefault(entry.label, []).append(title)
    lines = []
    for why, by_run in by_reason.items():
        by_titles: dict[str, list[str]] = {}
        for run, titles in by_run.items():
            by_titles.setdefault(", ".join(titles), []).append(run)
        for shown, runs in by_titles.items():
            whose = "all runs" if len(runs) == len(comparison.entries) else ", ".join(runs)
            lines.append(f"no {shown} ({whose}): {why}")
    return lines


# --- cells --------------------------------------------------------------------------------------


def _cell(spread: Spread | None, show: Callable[[float], str]) -> str:
    """Return the median, of several runs with the range; a hyphen where there is no number."""
    if spread is None:
        return "-"
    if len(spread.values) == 1:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.least)}-{show(spread.most)})"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds."""
    return number_text(seconds * 1e3)


def factor(value: float | None) -> str:
    """Return a speedup."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Return an efficiency."""
    return "-" if value is None else f"{value:.0%}"


def bar_length(width: int) -> int:
    """Return how long bars are on a screen of ``width`` columns."""
    return _LONG if width >= _WIDE else _SHORT


def bar(
    value: float | None, among: Sequence[float | None], length: int, *, blocks: bool = True
) -> str:
    """Return a bar: the largest value's has ``length`` signs, plain ones without ``blocks``."""
    most = max((each for each in among if each is not None), default=0.0)
    if value is None or most <= 0 or length == 0:
        return ""
    if not blocks:
        return "#" * max(1, round(value / most * length))
    whole, eighths = divmod(max(1, round(value / most * length * 8)), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()
