"""Tables of ``poprun-py compare`` and ``poprun-py scale``, as columns and as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from popdist_py.errors import counted
from poprun_py.display.formatting import number_text
from poprun_py.display.tables import Column, fitted_table, rich_lines
from poprun_py.past_runs.comparison import SECONDS, STEPS, Comparison, RunGroup, Spread
from poprun_py.past_runs.doubts import doubt_lines

_LONG_BAR, _SHORT_BAR, _WIDE_TERMINAL = 20, 10, 120
# The mark behind values that cannot be trusted; the lines below the table begin with the mark, too.
MARK: Final = "*"
_UNKNOWN: Final = "-"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_SCALINGS: Final[Mapping[str, str]] = {
    "strong": "strong scaling: the global batch is the same",
    "weak": "weak scaling: the global batch grows with the run",
}


def _milliseconds(seconds: float) -> str:
    return number_text(seconds * 1e3)


# The column title of each measured quantity, and the function that formats its values.
_QUANTITIES: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "samples_per_second": ("samples/s", number_text),
    "step_seconds": ("step ms", _milliseconds),
    "p95_seconds": ("p95 ms", _milliseconds),
    "seconds": ("seconds", number_text),
    "loss": ("loss", number_text),
}


def comparison_lines(
    comparison: Comparison, *, width: int, colour: bool = False, blocks: bool = True
) -> list[str]:
    """Return text lines with the table of a comparison and the reasons for missing values.

    If the table is wider than ``width`` characters, some of its columns are left out. If ``blocks``
    is true, bars are drawn with Unicode block characters, otherwise with ``#``.
    """
    columns = comparison_columns(comparison, bar_length=_bar_length(width), blocks=blocks)
    measure = f"compared with {comparison.base.label} by {comparison.measure.description}"
    doubts = comparison_doubts(comparison)
    missing = _missing_lines(comparison)
    return _lines(comparison, columns, measure, [*doubts, *missing], width, colour=colour)


def scaling_lines(
    comparison: Comparison, *, width: int, colour: bool = False, blocks: bool = True
) -> list[str]:
    """Return text lines with the table of a scaling test, one row for each number of instances."""
    columns = scaling_columns(comparison, bar_length=_bar_length(width), blocks=blocks)
    measure = f"median for each number of instances, by {comparison.measure.description}"
    return _lines(comparison, columns, measure, scaling_doubts(comparison), width, colour=colour)


def comparison_doubts(comparison: Comparison) -> list[str]:
    """Return a line for each reason why figures of a comparison cannot be trusted."""
    doubts = ((each.label, each.doubts) for each in comparison.groups)
    return [f"{MARK} {line}" for line in doubt_lines(doubts)]


def scaling_doubts(comparison: Comparison) -> list[str]:
    """Return a line for each reason why figures of a scaling test cannot be trusted."""
    doubts = ((counted(each.instances, "instance"), each.doubts) for each in comparison.groups)
    return [f"{MARK} {line}" for line in doubt_lines(doubts)]


def _lines(
    comparison: Comparison,
    columns: Sequence[Column],
    measure: str,
    remarks_on_values: Sequence[str],
    width: int,
    *,
    colour: bool,
) -> list[str]:
    table = rich_lines(fitted_table(columns, width=width), width=max(width, 20), colour=colour)
    scaling = [_SCALINGS[comparison.scaling]] if comparison.scaling else []
    remarks = [f"note: {each}" for each in comparison.remarks]
    return [*table, "", measure, *scaling, *remarks_on_values, *remarks]


def _missing_lines(comparison: Comparison) -> list[str]:
    by_reason: dict[str, dict[str, list[str]]] = {}
    for group in comparison.groups:
        for name, reason in group.missing.items():
            if name != "batch":
                title, _ = _QUANTITIES.get(name, (f"time to {comparison.target}", None))
                by_reason.setdefault(reason, {}).setdefault(group.label, []).append(title)
    lines = []
    for reason, by_run in by_reason.items():
        by_titles: dict[str, list[str]] = {}
        for run, titles in by_run.items():
            by_titles.setdefault(", ".join(titles), []).append(run)
        for shown, runs in by_titles.items():
            names = "all runs" if len(runs) == len(comparison.groups) else ", ".join(runs)
            lines.append(f"no {shown} ({names}): {reason}")
    return lines


# --- columns of the tables ----------------------------------------------------------------------


def comparison_columns(
    comparison: Comparison, *, bar_length: int = 0, blocks: bool = True
) -> list[Column]:
    """Return the table columns of a comparison; columns without any value are left out.

    The text bars in the table have at most ``bar_length`` characters.
    """
    groups = comparison.groups

    def column(title: str, cell: Callable[[RunGroup], str], drop_order: int = 0) -> Column:
        return Column(title, tuple(map(cell, groups)), drop_order)

    def numbers(name: str, drop_order: int) -> Column:
        title, show = _QUANTITIES.get(name, (f"s to {comparison.target}", number_text))
        return column(title, lambda each: _cell(each.numbers.get(name), show), drop_order)

    def differs(quantity: Callable[[RunGroup], object]) -> bool:
        return len(set(map(quantity, groups))) > 1

    columns = [
        Column("run", tuple(each.label for each in groups), is_text=True, breaks=True),
        column("instances", lambda each: str(each.instances)),
    ]
    if any(each.replicas != each.instances for each in groups):
        columns.append(column("replicas", lambda each: str(each.replicas), 3))
    if any(len(each.runs[0].hosts) > 1 for each in groups):
        columns.append(column("hosts", lambda each: str(len(each.runs[0].hosts)), 2))
    columns.append(numbers("samples_per_second", 0))
    columns.append(_marked(comparison, "speedup", lambda each: factor(each.speedup)))
    if differs(lambda each: each.instances):
        columns.append(_marked(comparison, "efficiency", lambda each: percent(each.efficiency), 9))
    efficiencies_differ = any(each.efficiency != each.efficiency_by_replicas for each in groups)
    if efficiencies_differ and differs(lambda each: each.replicas):
        by_replicas = "by replicas", lambda each: percent(each.efficiency_by_replicas), 6
        columns.append(_marked(comparison, *by_replicas))
    orders = {"step_seconds": 4, "p95_seconds": 1, "seconds": 7, "loss": 8, "reached": 0}
    columns += [numbers(name, order) for name, order in orders.items()]
    columns.append(_speed_column(groups, bar_length, blocks=blocks))
    return [each for each in columns if set(each.cells) - {_UNKNOWN, ""}]


def scaling_columns(
    comparison: Comparison, *, bar_length: int = 0, blocks: bool = True
) -> list[Column]:
    """Return the columns of a scaling test's table, without text bars if ``bar_length`` is 0."""
    groups = comparison.groups

    def column(title: str, cell: Callable[[RunGroup], str], drop_order: int = 0) -> Column:
        return Column(title, tuple(map(cell, groups)), drop_order)

    shown = [comparison.shown_speed(each) for each in groups]
    # If the measure is ``STEPS``, the speed column shows steps per second times replicas, so its
    # title is not the name of the measure.
    title = "replica steps/s" if comparison.measure is STEPS else comparison.measure.name
    columns = [
        column("instances", lambda each: str(each.instances)),
        column("replicas", lambda each: str(each.replicas), 3),
        column("runs", lambda each: str(len(each.runs)), 1),
        Column(title, tuple(_median(each, number_text) for each in shown)),
        Column("min-max", tuple(_UNKNOWN if each is None else _range(each) for each in shown), 4),
        _marked(comparison, "speedup", lambda each: factor(each.speedup)),
        column("ideal", lambda each: factor(comparison.ideal_speedup(each)), 6),
        _marked(comparison, "efficiency", lambda each: percent(each.efficiency)),
    ]
    if comparison.measure is not SECONDS:
        step = [each.numbers.get("step_seconds") for each in groups]
        columns.append(Column("step ms", tuple(_median(each, _milliseconds) for each in step), 2))
    if bar_length:
        columns.append(_speed_column(groups, bar_length, blocks=blocks))
    return columns


def _marked(
    comparison: Comparison, title: str, cell: Callable[[RunGroup], str], drop_order: int = 0
) -> Column:
    """Return a column whose doubtful values have a mark; the other values stay aligned."""
    marks = {True: MARK, False: " " if any(map(comparison.is_doubtful, comparison.groups)) else ""}
    cells = [
        value if (value := cell(each)) == _UNKNOWN else value + marks[comparison.is_doubtful(each)]
        for each in comparison.groups
    ]
    return Column(title, tuple(cells), drop_order)


def _speed_column(groups: Sequence[RunGroup], bar_length: int, *, blocks: bool) -> Column:
    speeds = [each.speed.median if each.speed else None for each in groups]
    bars = tuple(bar(speed, speeds, bar_length, blocks=blocks) for speed in speeds)
    return Column("speed", bars, 5, is_text=True, style="cyan")


# --- text of the cells --------------------------------------------------------------------------


def _cell(spread: Spread | None, show: Callable[[float], str]) -> str:
    """Return a quantity's median as text, with its range over several runs; ``-`` if unknown."""
    if spread is None or len(spread.values) == 1:
        return _median(spread, show)
    return f"{_median(spread, show)} ({_range(spread, show)})"


def _median(spread: Spread | None, show: Callable[[float], str]) -> str:
    return _UNKNOWN if spread is None else show(spread.median)


def _range(spread: Spread, show: Callable[[float], str] = number_text) -> str:
    return f"{show(spread.least)}-{show(spread.most)}"


def factor(value: float | None) -> str:
    """Return a speedup as text, such as ``1.98x``."""
    return _UNKNOWN if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Return an efficiency as text, such as ``99%``."""
    return _UNKNOWN if value is None else f"{value:.0%}"


def _bar_length(width: int) -> int:
    return _LONG_BAR if width >= _WIDE_TERMINAL else _SHORT_BAR


def bar(
    value: float | None, among: Sequence[float | None], length: int, *, blocks: bool = True
) -> str:
    """Return a text bar for ``value``; the bar of the largest value has ``length`` characters."""
    most = max((each for each in among if each is not None), default=0.0)
    if value is None or most <= 0 or length == 0:
        return ""
    if not blocks:
        return "#" * max(1, round(value / most * length))
    whole, eighths = divmod(max(1, round(value / most * length * 8)), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()
