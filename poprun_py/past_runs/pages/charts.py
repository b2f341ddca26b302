"""Charts as plain values: what plotly's JavaScript draws in a page, and the same in a sentence.

A figure is what plotly's own files hold (``{"data": [...], "layout": {...}}``), made here without
plotly, which needs half a second to be imported; a test has plotly check them. Colours are those of
a light page; page_frame.py has the page change them in the dark. Numbers that are none (NaN,
infinities, None) are gaps. Nothing here knows runs or HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from poprun_py.past_runs.pages.chart import Chart
from poprun_py.past_runs.pages.colours import (
    LIGHT,
    NEUTRAL,
    NUM_COLOURS,
    dash,
    faint_colour,
    series_colour,
)
from poprun_py.past_runs.pages.thinning import thinned, usual_range

# Of horizontal bars: a bar, and what is around all of them.
_BAR_HEIGHT, _AROUND_BARS = 30, 110
_MOST_BARS_HEIGHT = 1600
# With more series the legend would be larger than the chart.
_MOST_IN_LEGEND = 16
# Few values are put in fewer bins, else each would have its own.
_LEAST_BINS, _MOST_BINS = 8, 60
# So near to the left end no name fits on the left of its mark; how high a name is, in pixels.
_AT_LEFT, _ROW_HEIGHT = 0.2, 16
# From how many seconds on an axis has which unit, and the seconds of that.
_TIMES = ((3 * 3600, 3600, "hours"), (300, 60, "minutes"), (-math.inf, 1, "seconds"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series of points.

    Attributes:
        name: of the legend.
        xs: numbers, or names.
        ys: as many; what is no number is a gap.
        index: which colour (and dash) it has: for an instance, its own index.
        errors: of each point how far it may be below and above.
        is_reference: a thin dashed grey line to compare others with, as the ideal.
    """

    name: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[float | None]
    index: int = 0
    errors: Sequence[tuple[float, float]] = ()
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across a chart at ``at``, with a word on its right or left; horizontal if ``of_y``."""

    at: float
    name: str
    of_y: bool = False
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One value for each name of the chart's; ``colour`` is one of the light page."""

    name: str
    values: Sequence[float | None]
    colour: str = ""
    is_hatched: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of which a histogram shows how often each is; ``index`` as of a ``Line``."""

    name: str
    values: Sequence[float]
    index: int = 0


# --- charts -------------------------------------------------------------------------------------


def lines(
    title: str,
    told: str,
    series: Sequence[Line],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> Chart:
    """Return values over ``x``, a line for each series; long ones are thinned.

    Args:
        title: of the chart.
        told: the same in a sentence.
        series: the lines.
        x: what the horizontal axis shows, with its unit.
        y: what the vertical axis shows, with its unit.
        marks: lines across.
        from_zero: whether the vertical axis begins at 0.
    """
    data = []
    for line in series:
        kept = thinned(line.ys)
        data.append(
            {
                **_scatter(line),
                "mode": "lines" if len(kept) > 1 else "markers",
                "x": [line.xs[i] for i in kept],
                "y": [_number(line.ys[i]) for i in kept],
            }
        )
    layout = _layout(x, y, len(series), marks)
    if from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    return Chart(title, told, {"data": data, "layout": layout})


def over_time(
    title: str,
    told: str,
    series: Sequence[Line],
    *,
    y: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> Chart:
    """Return lines over the time since the run began, given in seconds; long runs have hours."""
    longest = max((float(line.xs[-1]) for line in series if line.xs), default=0.0)
    size, unit = next((size, unit) for least, size, unit in _TIMES if longest >= least)
    return lines(
        title,
        told,
        [replace(line, xs=[float(x) / size for x in line.xs]) for line in series],
        x=f"{unit} since the run began",
        y=y,
        marks=[each if each.of_y else replace(each, at=each.at / size) for each in marks],
        from_zero=from_zero,
    )


def points(
    title: str,
    told: str,
    series: Sequence[Line],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
) -> Chart:
    """Return few points with error bars, joined by lines; references have neither."""
    data = []
    for line in series:
        errors: dict[str, Any] = {}
        if line.errors:
            errors["error_y"] = {
                "type": "data",
                "symmetric": False,
                "arrayminus": [_number(below) for below, _ in line.errors],
                "array": [_number(above) for _, above in line.errors],
                "thickness": 1.5,
                "width": 5,
            }
        data.append(
            {
                **_scatter(line),
                "mode": "lines" if line.is_reference else "lines+markers",
                "marker": {"size": 8, "color": _colour(line)},
                "x": list(line.xs),
                "y": [_number(each) for each in line.ys],
                **errors,
            }
        )
    layout = _layout(x, y, len(series), marks)
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart(title, told, {"data": data, "layout": layout})


def bars(
    title: str,
    told: str,
    names: Sequence[str],
    parts: Sequence[Bars],
    *,
    unit: str,
    is_horizontal: bool = True,
    is_stacked: bool = True,
    marks: Sequence[Mark] = (),
) -> Chart:
    """Return bars, one for each name, of one or several parts.

    Args:
        title: of the chart.
        told: the same in a sentence.
        names: of the bars; horizontal ones stand in their order from top to bottom.
        parts: with a value for each name.
        unit: what the values are.
        is_horizontal: else they stand.
        is_stacked: parts follow one another; else they stand beside one another.
        marks: lines across at a value.
    """
    data = []
    for index, part in enumerate(parts):
        is_hatched = part.is_hatched or (not part.colour and index >= NUM_COLOURS)
        values = [_number(each) for each in part.values]
        data.append(
            {
                "type": "bar",
                "name": plotly_text(part.name),
                "orientation": "h" if is_horizontal else "v",
                "x": values if is_horizontal else [plotly_text(name) for name in names],
                "y": [plotly_text(name) for name in names] if is_horizontal else values,
                "marker": {
                    "color": part.colour or series_colour(index),
                    "pattern": {"shape": "/" if is_hatched else "", "solidity": 0.4},
                },
                "hovertemplate": f"%{{{'x' if is_horizontal else 'y'}:.4~g}}",
            }
        )
    across = [Mark(each.at, each.name, of_y=not is_horizontal) for each in marks]
    x, y = (unit, "") if is_horizontal else ("", unit)
    layout = _layout(x, y, len(parts), across)
    layout |= {"barmode": "stack" if is_stacked else "group", "bargap": 0.3}
    along, names_axis = ("xaxis", "yaxis") if is_horizontal else ("yaxis", "xaxis")
    layout[names_axis] |= {"type": "category", "showgrid": False}
    layout[along]["rangemode"] = "tozero"
    if not is_horizontal:
        return Chart(title, told, {"data": data, "layout": layout})
    layout["yaxis"]["autorange"] = "reversed"
    layout["hovermode"] = "y unified" if is_stacked else "closest"
    rows = len(names) * (1 if is_stacked else max(1, len(parts)))
    height = min(_AROUND_BARS + _BAR_HEIGHT * rows, _MOST_BARS_HEIGHT)
    return Chart(title, told, {"data": data, "layout": layout}, height)


def histogram(
    title: str, told: str, samples: Sequence[Sample], *, x: str, marks: Sequence[Mark] = ()
) -> Chart:
    """Return how often values are, as the share of each sample in bins of equal width.

    Where a few values lie far beyond the others, the bins end before them; ``told`` should name
    the greatest.
    """
    known = sorted(v for sample in samples for v in sample.values if math.isfinite(v))
    largest = max((len(sample.values) for sample in samples), default=0)
    bins = min(max(_LEAST_BINS, math.isqrt(4 * largest)), _MOST_BINS)
    low, high = usual_range(known)
    width = (high - low) / bins or 1.0  # of the least numbers that there are, nothing is left
    edges = [*(low + number * width for number in range(bins)), high]
    data = []
    for sample in samples:
        counts = [0] * bins
        for value in sample.values:
            if math.isfinite(value) and value <= high:
                counts[min(int((value - low) / width), bins - 1)] += 1
        total = len(sample.values) or 1
        line = Line(name=sample.name, xs=edges, ys=(), index=sample.index)
        shares = [round(count / total * 100, 4) for count in counts]
        data.append(
            {
                **_scatter(line),
                "mode": "lines",
                "line": {"color": _colour(line), "width": 1.5, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": faint_colour(sample.index),
                "x": edges,
                "y": [*shares, 0],
                "hovertemplate": "%{y:.3~g} %",
            }
        )
    # Names stand on rows of their own, and within the chart.
    inside = [
        replace(mark, is_left=mark.is_left and mark.at > low + _AT_LEFT * (high - low))
        for mark in marks
    ]
    layout = _layout(x, "% of steps", len(samples), inside)
    for row, name in enumerate(layout["annotations"]):
        name["yshift"] = -_ROW_HEIGHT * row
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart(title, told, {"data": data, "layout": layout})


# --- parts of figures ---------------------------------------------------------------------------


def _scatter(line: Line) -> dict[str, Any]:
    """Return what any line has."""
    style = "dash" if line.is_reference else dash(line.index)
    return {
        "type": "scatter",
        "name": plotly_text(line.name),
        "line": {"color": _colour(line), "width": 1.5 if line.is_reference else 2, "dash": style},
        "connectgaps": False,
        "hovertemplate": "%{y:.5~g}",
    }


def _colour(line: Line) -> str:
    return NEUTRAL if line.is_reference else series_colour(line.index)


def _layout(x: str, y: str, series: int, marks: Sequence[Mark]) -> dict[str, Any]:
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
        "hovermode": "x unified" if series <= _MOST_IN_LEGEND else "closest",
        "hoverlabel": {
            "bgcolor": LIGHT["ground"],
            "bordercolor": LIGHT["axis"],
            "font": {"color": LIGHT["text"]},
        },
        "showlegend": 1 < series <= _MOST_IN_LEGEND,
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
        "yaxis": {**axis, "title": {"text": plotly_text(y), "standoff": 10}},
        "shapes": [_across(mark) for mark in marks],
        "annotations": [_named(mark) for mark in marks if mark.name],
    }


def _across(mark: Mark) -> dict[str, Any]:
    along, over = ("y", "x") if mark.of_y else ("x", "y")
    return {
        "type": "line",
        f"{along}0": mark.at,
        f"{along}1": mark.at,
        f"{over}ref": "paper",
        f"{over}0": 0,
        f"{over}1": 1,
        "line": {"color": LIGHT["alert"], "width": 1.5, "dash": "dot"},
    }


def _named(mark: Mark) -> dict[str, Any]:
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
    """Return ``text`` so that plotly, which reads some HTML in it, shows it as it is."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
