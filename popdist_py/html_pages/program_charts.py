"""Charts of a program on a device: stacked areas, lanes of activities, points, and treemaps.

The charts are figures for plotly's JavaScript, as in the module ``charts``. A kind of value, such
as a category of memory, has the same colour in all charts of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.html_pages.chart_colours import LIGHT
from popdist_py.html_pages.charts import Bars, Line, Mark, bars, lines, plotly_text
from popdist_py.html_pages.page import Chart

__all__ = [
    "Area",
    "Lane",
    "Node",
    "Point",
    "PointKind",
    "Span",
    "areas",
    "lanes",
    "point_chart",
    "treemap",
]

_AREAS_HEIGHT: Final = 380
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
class Point:
    """A point of a chart with two axes of numbers, and a few words that describe the point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class PointKind:
    """All points of one kind, with the colour of the kind on a light page."""

    kind: str
    colour: str
    points: Sequence[Point]
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A rectangle of a treemap.

    Attributes:
        key: A text that is unique in the treemap.
        parent: The key of the rectangle around this one; empty for the outermost rectangle.
        label: The text in the rectangle.
        value: The size of the rectangle, at least the sum of the sizes of the rectangles in it.
            The size is an integer, because rounded sizes could add up to more than their sum.
        text: The size of the rectangle with its unit, for the reader.
        colour: The colour of the rectangle on a light page.
        is_hatched: Whether the rectangle is hatched.
    """

    key: str
    parent: str
    label: str
    value: int
    text: str
    colour: str
    is_hatched: bool = False


def areas(
    title: str,
    summary: str,
    layers: Sequence[Area],
    xs: Sequence[int],
    moments: Sequence[str],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
) -> Chart:
    """Return a chart of stacked areas over moments.

    ``xs`` are the positions of the points on the horizontal axis, and ``moments`` are their names.
    The reader sees the name of a moment when the pointer is over the chart.
    """
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    empty = lines(title, summary, [Line(name=each.name, xs=[], ys=[]) for each in layers],
                  x=x, y=y, marks=marks, from_zero=True)  # fmt: skip
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "all",
            "name": plotly_text(layer.name),
            "line": {"color": layer.colour, "width": 0.5, "shape": "hv"},
            "fillcolor": layer.colour,
            "fillpattern": {"shape": "/" if layer.is_hatched else "", "solidity": 0.35},
            "hovertemplate": "%{y:.4~g}",
            "x": list(xs),
            "y": [round(value, 4) for value in layer.values],
        }
        for layer in layers
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "all",
            "line": {"color": "rgba(0,0,0,0)", "width": 0},
            "showlegend": False,
            "hovertemplate": "%{y:.4~g}, %{text}",
            "x": list(xs),
            "y": [round(value, 4) for value in totals],
            "text": [plotly_text(moment) for moment in moments],
        }
    )
    return Chart(title, summary, {"data": data, "layout": empty.figure["layout"]}, _AREAS_HEIGHT)


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


def point_chart(
    title: str, summary: str, kinds: Sequence[PointKind], *, x: str, y: str,
    marks: Sequence[Mark] = (),
) -> Chart:  # fmt: skip
    """Return a chart of points, each with a colour for its kind."""
    shown = [kind for kind in kinds if kind.points]
    empty = lines(title, summary, [Line(name=kind.kind, xs=[], ys=[]) for kind in shown],
                  x=x, y=y, marks=marks)  # fmt: skip
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": plotly_text(kind.kind),
            "marker": {
                "color": kind.colour,
                "size": 16 if kind.is_large else 9,
                "symbol": "star" if kind.is_large else "circle",
                "line": {"color": LIGHT["ground"], "width": 1},
            },
            "x": [round(point.x, 4) for point in kind.points],
            "y": [round(point.y, 4) for point in kind.points],
            "text": [plotly_text(point.text) for point in kind.points],
            "hovertemplate": "%{text}<br>%{x:.4~g} and %{y:,.6~g}<extra></extra>",
        }
        for kind in shown
    ]
    layout = {**empty.figure["layout"], "hovermode": "closest", "showlegend": True}
    return Chart(title, summary, {"data": data, "layout": layout}, empty.height)


def treemap(title: str, summary: str, nodes: Sequence[Node]) -> Chart:
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
            "values": [node.value for node in nodes],
            "text": [plotly_text(node.text) for node in nodes],
            "textinfo": "label+text",
            "marker": {
                "colors": [node.colour for node in nodes],
                "line": {"color": LIGHT["ground"], "width": 1},
                # The pattern is drawn over the colour, so that texts can be read.
                "pattern": {
                    "shape": ["/" if node.is_hatched else "" for node in nodes],
                    "fillmode": "overlay",
                    "fgopacity": 0.2,
                    "solidity": 0.3,
                },
            },
            "tiling": {"pad": 1},
            "hovertemplate": "%{label}<br>%{text}, %{percentRoot:.1%} of all<extra></extra>",
        }
    ]
    layout = {
        key: value
        for key, value in empty.figure["layout"].items()
        if key in ("font", "paper_bgcolor", "hoverlabel", "modebar")
    }
    layout["margin"] = {"l": 4, "r": 4, "t": 4, "b": 4}
    return Chart(title, summary, {"data": data, "layout": layout}, _TREEMAP_HEIGHT)
