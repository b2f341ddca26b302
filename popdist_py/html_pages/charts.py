"""Line, point and bar charts and histograms, as figures for plotly's JavaScript.

A figure is a dictionary in plotly's format (``{"data": [...], "layout": {...}}``). This module
does not import the Python package plotly, because the import takes half a second. Figures have the
colours for light pages. NaN, infinity and None are drawn as gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from popdist_py.html_pages.chart_colours import (
    LIGHT,
    NEUTRAL,
    NUM_COLOURS,
    dash,
    faint_colour,
    series_colour,
)
from popdist_py.html_pages.page import Chart

_BAR_HEIGHT, _HEIGHT_AROUND_BARS, _MOST_BARS_HEIGHT = 30, 110, 1600
# A chart with more than 16 series has no legend, because the legend would be larger than the chart.
_MOST_IN_LEGEND = 16
_LEAST_BINS, _MOST_BINS = 8, 60
# In the leftmost fifth of a histogram, the name of a mark is printed on the right of the mark's
# line, because there is no room on the left.
_LEFT_PART, _NAME_HEIGHT = 0.2, 16
# A time axis is in hours from 3 hours on, in minutes from 300 seconds on, and else in seconds.
_TIME_UNITS = ((3 * 3600, 3600, "hours"), (300, 60, "minutes"), (-math.inf, 1, "seconds"))
# A line is drawn with at most 1000 points, because few charts are wider than 1000 pixels.
MOST_POINTS = 1000
_KEPT_OF_A_BUCKET = 3
# A histogram ends at the 99 % quantile, or a little beyond, so that a few outliers do not squeeze
# all other values into one bin.
_SHOWN_QUANTILE, _SHOWN_BEYOND = 0.99, 1.15


# --- data of charts -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series of points.

    Attributes:
        name: The name of the line in the legend.
        xs: The position of each point on the horizontal axis: numbers or names.
        ys: The position of each point on the vertical axis. NaN, infinity and None are gaps.
        index: The number that selects the line's colour and dash pattern. The line of an instance
            has the instance's index.
        errors: A pair for each point: the lengths of its error bar below and above the point.
        is_reference: Whether the line is thin, dashed and grey, as a reference for the other lines.
    """

    name: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[float | None]
    index: int = 0
    errors: Sequence[tuple[float, float]] = ()
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the whole chart at the value ``at`` of an axis, with its name beside the line.

    If ``of_y`` is true, the line is horizontal, else vertical. The name of a vertical line is on
    the right of the line, or on the left if ``is_left``.
    """

    at: float
    name: str
    of_y: bool = False
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A series of bars; ``values`` are the lengths, ``colour`` is the colour on a light page."""

    name: str
    values: Sequence[float | None]
    colour: str = ""
    is_hatched: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of one series of a histogram; ``index`` selects the colour of the series."""

    name: str
    values: Sequence[float]
    index: int = 0


# --- charts -------------------------------------------------------------------------------------


def lines(
    title: str,
    summary: str,
    series: Sequence[Line],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> Chart:
    """Return a line chart; a line with very many points is thinned.

    ``summary`` is a sentence with the important numbers of the chart. ``x`` and ``y`` are the
    titles of the axes.
    """
    traces = []
    for line in series:
        kept = thinned(line.ys)
        traces.append(_trace(line, kept, "lines" if len(kept) > 1 else "markers"))
    layout = _layout(x, y, len(series), marks, from_zero=from_zero)
    return Chart(title, summary, {"data": traces, "layout": layout})


def over_time(
    title: str,
    summary: str,
    series: Sequence[Line],
    *,
    y: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    since: str = "the run began",
) -> Chart:
    """Return a line chart over the time since a run or its training began.

    The times of the points are in seconds; times before the begin are negative. The time axis is in
    seconds, minutes or hours.
    """
    ends = [abs(float(line.xs[end])) for line in series if line.xs for end in (0, -1)]
    longest = max(ends, default=0.0)
    size, unit = next((size, unit) for least, size, unit in _TIME_UNITS if longest >= least)
    return lines(
        title,
        summary,
        [replace(line, xs=[float(x) / size for x in line.xs]) for line in series],
        x=f"{unit} since {since}",
        y=y,
        marks=[each if each.of_y else replace(each, at=each.at / size) for each in marks],
        from_zero=from_zero,
    )


def points(
    title: str, summary: str, series: Sequence[Line], *, x: str, y: str, x_ticks: Sequence[int] = ()
) -> Chart:
    """Return a chart of a few points with error bars, joined by lines.

    ``x_ticks`` are the numbers to print along the horizontal axis; by default, plotly chooses them.
    """
    traces = []
    for line in series:
        trace = _trace(line, range(len(line.ys)), "lines" if line.is_reference else "lines+markers")
        trace["marker"] = {"size": 8, "color": _colour(line)}
        if line.errors:
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "arrayminus": [_finite(below) for below, _ in line.errors],
                "array": [_finite(above) for _, above in line.errors],
                "thickness": 1.5,
                "width": 5,
            }
        traces.append(trace)
    layout = _layout(x, y, len(series), from_zero=True)
    if x_ticks:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": sorted(set(x_ticks))}
    return Chart(title, summary, {"data": traces, "layout": layout})


def bars(
    title: str,
    summary: str,
    names: Sequence[str],
    series: Sequence[Bars],
    *,
    unit: str,
    marks: Sequence[Mark] = (),
) -> Chart:
    """Return a chart with a horizontal bar for each name. A bar stacks the values of all series."""
    data = [
        {
            "type": "bar",
            "name": plotly_text(each.name),
            "orientation": "h",
            "x": [_finite(value) for value in each.values],
            "y": [plotly_text(name) for name in names],
            "marker": {
                "color": each.colour or series_colour(index),
                "pattern": {
                    "shape": "/" if each.is_hatched or _is_repeated(each, index) else "",
                    "solidity": 0.4,
                },
            },
            "hovertemplate": "%{x:.4~g}",
        }
        for index, each in enumerate(series)
    ]
    layout = _layout(unit, "", len(series), marks)
    layout["xaxis"]["rangemode"] = "tozero"
    layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}
    layout |= {"barmode": "stack", "bargap": 0.3, "hovermode": "y unified"}
    height = min(_HEIGHT_AROUND_BARS + _BAR_HEIGHT * len(names), _MOST_BARS_HEIGHT)
    return Chart(title, summary, {"data": data, "layout": layout}, height)


def _is_repeated(series: Bars, index: int) -> bool:
    """Return whether an earlier series of the chart has the same colour as series ``index``."""
    return not series.colour and index >= NUM_COLOURS


def histogram(
    title: str, summary: str, samples: Sequence[Sample], *, x: str, marks: Sequence[Mark] = ()
) -> Chart:
    """Return a histogram of the samples; bins have equal width, and heights are percentages.

    A few values that are far greater than the others are not drawn, so ``summary`` should name the
    greatest value.
    """
    known = sorted(v for sample in samples for v in sample.values if math.isfinite(v))
    largest = max((len(sample.values) for sample in samples), default=0)
    bins = min(max(_LEAST_BINS, math.isqrt(4 * largest)), _MOST_BINS)
    low, high = _usual_range(known)
    width = (high - low) / bins or 1.0  # the division of a tiny float may give 0
    edges = [*(low + number * width for number in range(bins)), high]
    traces = []
    for sample in samples:
        counts = [0] * bins
        for value in sample.values:
            if math.isfinite(value) and value <= high:
                counts[min(int((value - low) / width), bins - 1)] += 1
        total = len(sample.values) or 1
        shares = [round(count / total * 100, 4) for count in counts]
        line = Line(name=sample.name, xs=edges, ys=[*shares, 0], index=sample.index)
        trace = _trace(line, range(bins + 1), "lines")
        trace["line"] = {"color": _colour(line), "width": 1.5, "shape": "hv"}
        trace["hovertemplate"] = "%{y:.3~g} %"
        traces.append({**trace, "fill": "tozeroy", "fillcolor": faint_colour(sample.index)})
    inside = [
        replace(mark, is_left=mark.is_left and mark.at > low + _LEFT_PART * (high - low))
        for mark in marks
    ]
    layout = _layout(x, "% of steps", len(samples), inside, from_zero=True)
    # The names of marks are printed one below another, because names of neighbouring marks would
    # overlap.
    for row, name in enumerate(layout["annotations"]):
        name["yshift"] = -_NAME_HEIGHT * row
    return Chart(title, summary, {"data": traces, "layout": layout})


def _usual_range(known: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper limit of a histogram of sorted values."""
    if not known:
        return 0.0, 1.0
    usual = known[min(int(len(known) * _SHOWN_QUANTILE), len(known) - 1)]
    low = known[0]
    high = min(known[-1], low + (usual - low) * _SHOWN_BEYOND)
    if high <= low:  # all values are equal
        return low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    return low, high


def thinned(ys: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Choose at most ``most`` points of a line to draw; return their indices in order.

    The points between the first and the last are put into buckets of neighbouring points. The
    least value, the greatest value and the first gap (NaN, infinity or None) of each bucket are
    chosen, so that no peak is lost. ``most`` must be at least 5.
    """
    count = len(ys)
    if count <= most:
        return list(range(count))
    buckets = (most - 2) // _KEPT_OF_A_BUCKET
    kept = {0, count - 1}
    for number in range(buckets):
        bucket = range(
            1 + (count - 2) * number // buckets, 1 + (count - 2) * (number + 1) // buckets
        )
        known = [(y, i) for i in bucket if (y := _finite(ys[i])) is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
        if len(known) < len(bucket):
            kept.add(next(i for i in bucket if _finite(ys[i]) is None))
    return sorted(kept)


# --- parts of figures ---------------------------------------------------------------------------


def _trace(line: Line, kept: Sequence[int], mode: str) -> dict[str, Any]:
    """Return a line in plotly's format, with the points whose indices are ``kept``."""
    style = "dash" if line.is_reference else dash(line.index)
    return {
        "type": "scatter",
        "mode": mode,
        "name": plotly_text(line.name),
        "line": {"color": _colour(line), "width": 1.5 if line.is_reference else 2, "dash": style},
        "connectgaps": False,
        "hovertemplate": "%{y:.5~g}",
        "x": [line.xs[i] for i in kept],
        "y": [_finite(line.ys[i]) for i in kept],
    }


def _colour(line: Line) -> str:
    return NEUTRAL if line.is_reference else series_colour(line.index)


def _layout(
    x: str, y: str, num_series: int, marks: Sequence[Mark] = (), *, from_zero: bool = False
) -> dict[str, Any]:
    axis = {
        "color": LIGHT["text"],
        "gridcolor": LIGHT["grid"],
        "linecolor": LIGHT["axis"],
        "zeroline": False,
        "automargin": True,
    }
    return {
        "font": {"size": 12, "color": LIGHT["text"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 12, "t": 12, "b": 40},
        "hovermode": "x unified" if num_series <= _MOST_IN_LEGEND else "closest",
        "hoverlabel": {
            "bgcolor": LIGHT["ground"],
            "bordercolor": LIGHT["axis"],
            "font": {"color": LIGHT["text"]},
        },
        "showlegend": 1 < num_series <= _MOST_IN_LEGEND,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": LIGHT["axis"],
            "activecolor": LIGHT["text"],
        },
        "xaxis": {**axis, "title": {"text": plotly_text(x)}, "showgrid": False, "showline": True},
        "yaxis": {
            **axis,
            "title": {"text": plotly_text(y), "standoff": 10},
            "rangemode": "tozero" if from_zero else "normal",
        },
        "shapes": [_mark_line(mark) for mark in marks],
        "annotations": [_mark_name(mark) for mark in marks if mark.name],
    }


def _mark_line(mark: Mark) -> dict[str, Any]:
    along, across = ("y", "x") if mark.of_y else ("x", "y")
    return {
        "type": "line",
        f"{along}0": mark.at,
        f"{along}1": mark.at,
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        "line": {"color": LIGHT["alert"], "width": 1.5, "dash": "dot"},
    }


def _mark_name(mark: Mark) -> dict[str, Any]:
    side = "right" if mark.is_left else "left"
    place = {"x": 1, "xref": "paper", "xanchor": "right", "y": mark.at, "yanchor": "bottom"}
    if not mark.of_y:
        place = {"x": mark.at, "xanchor": side, "y": 1, "yref": "paper", "yanchor": "top"}
    return {
        **place,
        "text": plotly_text(mark.name),
        "showarrow": False,
        "font": {"size": 11, "color": LIGHT["alert"]},
        "bgcolor": LIGHT["ground"],
        "opacity": 0.85,
    }


def plotly_text(text: str) -> str:
    """Return ``text`` escaped for plotly, which interprets some HTML in its texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
