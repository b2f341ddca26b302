"""Charts of a program on a device: stacked areas, lanes of activities, and treemaps.

The charts are figures for plotly's JavaScript, as in the module ``charts``. A kind of value, such
as a category of memory, has the same colour in all charts of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.html_pages.chart_colours import LIGHT
from popdist_py.html_pages.charts import (
    MOST_POINTS,
    Bars,
    Line,
    Mark,
    bars,
    lines,
    plotly_text,
    thinned,
)
from popdist_py.html_pages.page import Chart

__all__ = ["Area", "Lane", "Node", "Span", "areas", "lanes", "treemap"]

# The number of points of all areas of a chart together. A stack of ten areas with 1000 points each
# would make a page with many charts too large.
_MOST_AREA_POINTS: Final = 4 * MOST_POINTS
_LEAST_POINTS: Final = 60
_TREEMAP_HEIGHT: Final = 460
_SHOWN_LEVELS: Final = 4


@dataclass(frozen=True, slots=True)
class Area:
    """A layer of a stacked area chart: its name, its values, and its colour on a light page."""

    name: str
    values: Sequence[float]
    colour: str
    is_hatched: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """An activity in a lane.

    Attributes:
        row: The name of the lane, such as ``IPU 0``.
        begin: The start of the activity, in the unit of the chart.
        length: The duration of the activity, in the unit of the chart.
        text: A few words that describe the activity.
    """

    row: str
    begin: float
    length: float
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    """All activities of one kind in a chart of lanes, with the colour of the kind."""

    kind: str
    colour: str
    spans: Sequence[Span]
    is_hatched: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A rectangle of a treemap.

    Attributes:
        key: A text that is unique in the treemap.
        parent: The key of the rectangle around this one; empty for the outermost rectangle.
        label: The text in the rectangle.
        value: The size of the rectangle, at least the sum of the sizes of the rectangles in it.
        colour: The colour of the rectangle on a light page.
    """

    key: str
    parent: str
    label: str
    value: float
    colour: str


def areas(
    title: str,
    summary: str,
    layers: Sequence[Area],
    moments: Sequence[str],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
) -> Chart:
    """Return a chart of stacked areas over moments; long series are thinned without losing peaks.

    ``moments`` are the names of the points along the horizontal axis. The reader sees the name of a
    moment when the pointer is over the chart.
    """
    totals = [sum(layer.values[i] for layer in layers) for i in range(len(moments))]
    most = max(_LEAST_POINTS, _MOST_AREA_POINTS // max(1, len(layers)))
    kept = thinned(totals, most)
    empty = lines(title, summary, [Line(name=each.name, xs=[], ys=[]) for each in layers],
                  x=x, y=y, marks=marks, from_zero=True)  # fmt: skip
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "all",
            "name": plotly_text(layer.name),
            "line": {"color": layer.colour, "width": 0.5},
            "fillcolor": layer.colour,
            "fillpattern": {"shape": "/" if layer.is_hatched else "", "solidity": 0.35},
            "hovertemplate": "%{y:.4~g}",
            "x": kept,
            "y": [round(layer.values[i], 4) for i in kept],
        }
        for layer in layers
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "all",
            "line": {"color": LIGHT["text"], "width": 1},
            "showlegend": False,
            "hovertemplate": "%{y:.4~g}, %{text}",
            "x": kept,
            "y": [round(totals[i], 4) for i in kept],
            "text": [plotly_text(moments[i]) for i in kept],
        }
    )
    return Chart(title, summary, {"data": data, "layout": empty.figure["layout"]}, 380)


def lanes(
    title: str, summary: str, rows: Sequence[str], kinds: Sequence[Lane], *, unit: str
) -> Chart:
    """Return a chart with one lane for each row, in which activities stand beside one another."""
    empty = bars(title, summary, rows, [Bars(kind.kind, ()) for kind in kinds], unit=unit)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plotly_text(kind.kind),
            "base": [round(span.begin, 6) for span in kind.spans],
            "x": [round(span.length, 6) for span in kind.spans],
            "y": [plotly_text(span.row) for span in kind.spans],
            "text": [plotly_text(span.text) for span in kind.spans],
            "textposition": "none",
            "marker": {
                "color": kind.colour,
                "pattern": {"shape": "/" if kind.is_hatched else "", "solidity": 0.4},
                "line": {"color": LIGHT["ground"], "width": 0.5},
            },
            "hovertemplate": f"%{{y}}, %{{text}}<br>%{{x:.4~g}} {plotly_text(unit)}",
        }
        for kind in kinds
    ]
    layout = {**empty.figure["layout"], "barmode": "overlay", "hovermode": "closest"}
    layout["showlegend"] = True
    layout["yaxis"] = {
        **layout["yaxis"],
        "categoryorder": "array",
        "categoryarray": [plotly_text(row) for row in rows],
    }
    return Chart(title, summary, {"data": data, "layout": layout}, empty.height)


def treemap(title: str, summary: str, nodes: Sequence[Node], *, unit: str) -> Chart:
    """Return a treemap, in which the area of a rectangle is proportional to its value.

    A click on a rectangle enlarges the rectangle.
    """
    empty = lines(title, summary, [], x="", y="")
    data = [
        {
            "type": "treemap",
            "branchvalues": "total",
            "maxdepth": _SHOWN_LEVELS,
            "ids": [node.key for node in nodes],
            "parents": [node.parent for node in nodes],
            "labels": [plotly_text(node.label) for node in nodes],
            "values": [round(node.value, 4) for node in nodes],
            "marker": {
                "colors": [node.colour for node in nodes],
                "line": {"color": LIGHT["ground"], "width": 1},
            },
            "tiling": {"pad": 1},
            "hovertemplate": f"%{{label}}<br>%{{value:.4~g}} {plotly_text(unit)}, "
            "%{percentRoot:.1%} of all<extra></extra>",
        }
    ]
    layout = {
        key: value
        for key, value in empty.figure["layout"].items()
        if key in ("font", "paper_bgcolor", "hoverlabel", "modebar")
    }
    layout["margin"] = {"l": 4, "r": 4, "t": 4, "b": 4}
    return Chart(title, summary, {"data": data, "layout": layout}, _TREEMAP_HEIGHT)
