"""The section "Comparison" of a page, which shows two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from popdist_py.html_pages.charts import Bars, Mark, bars
from popdist_py.html_pages.page import Cell, Part, Section, Sentence, Table
from popdist_py.ipu.page.charted_values import (
    ACTIVITY_STYLES,
    ACTIVITY_TITLES,
    VERDICT_KINDS,
    category_style,
    percent,
)
from popdist_py.ipu.page.saved_reports import SavedReports

__all__ = ["comparison_section"]

_MOST_IPUS: Final = 16
# A relative difference below this share has no colour.
_NOTICEABLE: Final = 0.001
# A row of the comparison: a quantity, its value in both reports, and the difference.
_Row: TypeAlias = tuple[str, str | Cell, str | Cell, str | Cell]


def comparison_section(this: SavedReports, other: SavedReports) -> Section:
    """Return the section that shows two reports side by side, with their differences."""
    rows = [
        _words("verdict", this.verdict, other.verdict),
        _words("device", this.device, other.device),
        _share_row("fullest tile", this.share, other.share, is_more_better=False),
        _row("MB of the fullest IPU", _most(this), _most(other), "{:,.1f}", is_more_better=False),
        _row("IPUs of a replica", len(this.ipus), len(other.ipus), "{:,.0f}"),
        _row("samples of a call", this.samples, other.samples, "{:,.0f}"),
        _row("samples/s", this.throughput, other.throughput, "{:,.1f}", is_more_better=True),
        _row("ms of a call", this.seconds * 1e3, other.seconds * 1e3, "{:,.1f}"),
        _row("cycles of a call", this.cycles, other.cycles, "{:,.0f}"),
        _share_row("busy, mean of the IPUs", _busy(this), _busy(other)),
    ]
    changed = _changed_options(this, other)
    names = f"This report is {this.name}. The other report is {other.name}."
    if this.name == other.name:
        names = f"Both reports are of {this.name}."
    parts: list[Part] = [
        Sentence(
            f"{names} Differences are relative to the other report: green is better, and orange "
            "is worse."
        ),
    ]
    if changed:
        columns = ("option that differs", "this report", "other report")
        parts.append(Table("Different options", columns, changed))
    parts.append(Table("Comparison", _columns("quantity"), rows))
    parts.append(_memory_chart(this, other))
    parts.append(
        Table("Memory in both reports", _columns("MB of all IPUs"), list(_memory_rows(this, other)))
    )
    if _has_times(this) and _has_times(other):
        parts.append(_time_chart(this, other))
        times = list(_time_rows(this, other))
        parts.append(
            Table("Time in both reports", _columns("\u00b5s of a sample, mean of the IPUs"), times)
        )
    return Section("Comparison", tuple(parts))


def _columns(quantity: str) -> tuple[str, ...]:
    return quantity, "this report", "other report", "difference"


# --- rows ---------------------------------------------------------------------------------------


def _words(name: str, this: str, other: str) -> _Row:
    first, second = (Cell(each, VERDICT_KINDS.get(each, "")) for each in (this, other))
    return name, first, second, "" if this == other else "differs"


def _row(
    name: str, this: float, other: float, form: str, *, is_more_better: bool | None = None
) -> _Row:
    """Return a row with two numbers, where ``is_more_better`` says which one is better, if any."""
    change = this - other
    if this == other:
        difference = ""
    elif other:
        difference = f"{_signed(form, change)} ({change / other:+.1%})"
    else:
        difference = f"{_signed(form, change)} (only in this report)"
    is_small = abs(change) <= _NOTICEABLE * abs(other)
    kind = "" if is_small or is_more_better is None else _kind(change, is_more_better)
    return name, form.format(this), form.format(other), Cell(difference, kind)


def _signed(form: str, number: float) -> str:
    return f"{'+' if number > 0 else '-'}{form.format(abs(number))}"


def _kind(change: float, is_more_better: bool) -> str:
    return "good" if (change > 0) == is_more_better else "warn"


def _share_row(name: str, this: float, other: float, *, is_more_better: bool | None = None) -> _Row:
    points = (this - other) * 100
    first, second = (Cell(percent(one), share=min(1.0, max(0.0, one))) for one in (this, other))
    if abs(points) < 0.05:
        return name, first, second, ""
    kind = "" if is_more_better is None else _kind(points, is_more_better)
    return name, first, second, Cell(f"{points:+.1f} points", kind)


def _memory_rows(this: SavedReports, other: SavedReports) -> Iterator[_Row]:
    sums = [_by_category(one) for one in (this, other)]
    for name in dict.fromkeys([*sums[0], *sums[1]]):
        first, second = (one.get(name, 0) / 1e6 for one in sums)
        if first or second:
            yield _row(name, first, second, "{:,.1f}", is_more_better=False)
    first, second = (sum(one.values()) / 1e6 for one in sums)
    yield _row("all", first, second, "{:,.1f}", is_more_better=False)


def _by_category(reports: SavedReports) -> dict[str, int]:
    sums: dict[str, int] = {}
    for own in reports.ipus:
        for name, size in own.by_category.items():
            sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _most(reports: SavedReports) -> float:
    return max(own.needed for own in reports.ipus) / 1e6


def _busy(reports: SavedReports) -> float:
    return sum(own.busy for own in reports.ipus) / len(reports.ipus)


def _changed_options(this: SavedReports, other: SavedReports) -> Sequence[tuple[str, str, str]]:
    names = dict.fromkeys([*this.options, *other.options])
    rows = ((name, this.options.get(name, "-"), other.options.get(name, "-")) for name in names)
    return [row for row in rows if row[1] != row[2]]


# --- time ---------------------------------------------------------------------------------------


def _has_times(reports: SavedReports) -> bool:
    return reports.samples > 0 and reports.cycles > 0 and any(own.cycles for own in reports.ipus)


def _microseconds(reports: SavedReports, cycles: Mapping[str, float]) -> dict[str, float]:
    """Return the time of an IPU for a sample by kind, in microseconds.

    Two calls may have different numbers of samples, and two devices different clocks.
    """
    factor = reports.seconds / reports.cycles / reports.samples * 1e6
    return {name: size * factor for name, size in cycles.items()}


def _time_rows(this: SavedReports, other: SavedReports) -> Iterator[_Row]:
    sums = [_mean_times(one) for one in (this, other)]
    for name in (name for name in ACTIVITY_STYLES if any(one.get(name) for one in sums)):
        first, second = (one.get(name, 0.0) for one in sums)
        yield _row(ACTIVITY_TITLES[name], first, second, "{:,.2f}", is_more_better=False)
    title, times = "all: a call, divided by its samples", (_sample_time(this), _sample_time(other))
    yield _row(title, times[0], times[1], "{:,.2f}", is_more_better=False)


def _mean_times(reports: SavedReports) -> dict[str, float]:
    sums: dict[str, float] = {}
    for own in reports.ipus:
        for name, size in _microseconds(reports, own.cycles).items():
            sums[name] = sums.get(name, 0.0) + size / len(reports.ipus)
    return sums


def _sample_time(reports: SavedReports) -> float:
    return reports.seconds / reports.samples * 1e6


# --- charts -------------------------------------------------------------------------------------


def _memory_chart(this: SavedReports, other: SavedReports) -> Part:
    ipus = [own for reports in (this, other) for own in reports.ipus[:_MOST_IPUS]]
    names = list(dict.fromkeys([*_by_category(this), *_by_category(other)]))
    capacity = min(own.capacity for own in ipus) / 1e6
    return bars(
        "Memory of both reports by category",
        f"The fullest IPU needs {_most(this):,.1f} MB in this report and {_most(other):,.1f} MB in "
        f"the other one.{_left_out(this, other)}",
        _bar_names(this, other),
        [
            Bars(name, [own.by_category.get(name, 0) / 1e6 for own in ipus], *category_style(name))
            for name in names
        ],
        unit="MB",
        marks=[Mark(capacity, "available", is_left=True)],
    )


def _time_chart(this: SavedReports, other: SavedReports) -> Part:
    times = [
        _microseconds(reports, own.cycles)
        for reports in (this, other)
        for own in reports.ipus[:_MOST_IPUS]
    ]
    shown = [name for name in ACTIVITY_STYLES if any(own.get(name) for own in times)]
    return bars(
        "Time of both reports by kind",
        f"A sample takes {_sample_time(this):,.2f} \u00b5s in this report and "
        f"{_sample_time(other):,.2f} \u00b5s in the other one: the time of a call, divided by "
        f"its samples.{_left_out(this, other)}",
        _bar_names(this, other),
        [
            Bars(ACTIVITY_TITLES[name], [own.get(name, 0.0) for own in times],
                 *ACTIVITY_STYLES[name])
            for name in shown
        ],
        unit="\u00b5s of a sample",
    )  # fmt: skip


def _bar_names(this: SavedReports, other: SavedReports) -> list[str]:
    names = [f"this: IPU {own.ipu}" for own in this.ipus[:_MOST_IPUS]]
    return names + [f"other: IPU {own.ipu}" for own in other.ipus[:_MOST_IPUS]]


def _left_out(*both: SavedReports) -> str:
    if all(len(reports.ipus) <= _MOST_IPUS for reports in both):
        return ""
    return f" The first {_MOST_IPUS} IPUs of a report are drawn."
