"""Figures of charts, which plotly must accept, and the thinning of long lines."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.html_pages.charts import (
    MOST_POINTS,
    Bars,
    Line,
    Mark,
    Sample,
    bars,
    histogram,
    lines,
    over_time,
    points,
    thinned,
)
from popdist_py.html_pages.program_charts import Area, Lane, Node, Span, areas, lanes, treemap

NAN = math.nan
LINES = [
    Line(name="instance 0", xs=[0, 1, 2], ys=[1.0, NAN, 3.0]),
    Line(name="ideal", xs=[0, 1, 2], ys=[1.0, 2.0, 3.0], is_reference=True),
]
CHARTS = {
    "lines": lines("t", "s", LINES, x="s", y="y", marks=[Mark(1, "attempt 2"), Mark(2, "", True)]),
    "no lines": lines("t", "s", [], x="s", y="y"),
    "a point": lines("t", "s", [Line(name="a", xs=[1], ys=[2])], x="s", y="y", from_zero=True),
    "points": points(
        "t", "s", [Line(name="a", xs=[1, 2], ys=[1, 2], errors=[(0.1, 0.2), (0, NAN)]), LINES[1]],
        x="instances", y="speedup",
    ),
    "bars": bars("t", "s", ["a", "b"], [Bars("x", [1, None]), Bars("y", [2, 3], is_hatched=True)],
                 unit="ms", marks=[Mark(3, "limit")]),
    "histogram": histogram("t", "s", [Sample("a", [1.0, 2.0, NAN])], x="ms",
                           marks=[Mark(1.5, "median", is_left=True)]),
    "no values": histogram("t", "s", [Sample("a", [])], x="ms"),
    "equal values": histogram("t", "s", [Sample("a", [2.0] * 5)], x="ms"),
    "zeros": histogram("t", "s", [Sample("a", [0.0] * 5)], x="ms"),
    "areas": areas("t", "s", [Area("a", [1, 2], "#0056b4"), Area("b", [2, 0], "#e56713", True)],
                   [0, 7], ["first", "last"], x="moment", y="MB",
                   marks=[Mark(3, "limit", of_y=True)]),
    "no moments": areas("t", "s", [Area("a", [], "#0056b4")], [], [], x="moment", y="MB"),
    "lanes": lanes("t", "s", ["IPU 0", "IPU 1"],
                   [Lane("forward", "#0056b4", [Span("IPU 1", 1, 2, "micro-batch 1")], True)],
                   unit="cycles"),
    "treemap": treemap("t", "s", [Node("a", "", "all", 3, "3 MB", "#fefefe"),
                                  Node("b", "a", "part", 1, "1 MB", "#0056b4")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHARTS)
def test_figures_are_json(name):
    json.dumps(CHARTS[name].figure, allow_nan=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plotly_accepts_every_figure():
    import plotly.graph_objects as go

    for name, chart in CHARTS.items():
        figure = go.Figure(chart.figure)
        assert len(figure.data) == len(chart.figure["data"]), name
    with pytest.raises(ValueError, match="hovermodes"):  # an unknown property is refused
        go.Figure({"data": [], "layout": {"hovermodes": "x"}})


def test_charts_do_not_import_plotly(script):
    program = script(
        "import sys\n"
        "from popdist_py.html_pages import charts, page\n"
        "from poprun_py.past_runs.pages import run_page\n"
        "page.packed_plotly()\n"
        "heavy = {'plotly', 'numpy', 'torch', 'rich'}\n"
        "found = {name.partition('.')[0] for name in sys.modules} & heavy\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": ":".join(filter(None, sys.path))})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_names_are_escaped_for_plotly():
    chart = lines("t", "s", [Line(name="<b>&", xs=[0, 1], ys=[0, 1])], x="<i>", y="<u>",
                  marks=[Mark(1, "<br>")])  # fmt: skip
    assert chart.figure["data"][0]["name"] == "&lt;b&gt;&amp;"
    assert "<" not in json.dumps(chart.figure)


def test_names_of_a_program_are_escaped_for_plotly():
    evil = "<b>&"
    drawn = (
        areas(evil, "s", [Area(evil, [1], "#0056b4")], [0], [evil], x=evil, y=evil),
        lanes(evil, "s", [evil], [Lane(evil, "#0056b4", [Span(evil, 0, 1, evil)])], unit=evil),
        treemap(evil, "s", [Node("a", "", evil, 3, evil, "#0056b4")]),
    )
    for chart in drawn:
        text = json.dumps(chart.figure)
        assert evil not in text
        assert "&lt;b&gt;&amp;" in text


def test_areas_are_stacked_and_name_each_moment():
    layers = [Area("a", [1.0, 2.0], "#0056b4"), Area("b", [2.0, 5.0], "#e56713")]
    chart = areas("t", "s", layers, [0, 40], ["conv1", "conv2"], x="x", y="y")
    *stacked, total = chart.figure["data"]
    assert [trace["x"] for trace in chart.figure["data"]] == [[0, 40]] * 3
    assert len({trace["stackgroup"] for trace in stacked}) == 1
    assert (total["y"], total["text"]) == ([3.0, 7.0], ["conv1", "conv2"])


def test_long_lines_are_thinned():
    ys = [0.0] * 50_000
    ys[31_415] = 9.0
    (trace,) = lines("t", "s", [Line(name="a", xs=range(50_000), ys=ys)], x="x", y="y").figure[
        "data"
    ]
    assert len(trace["x"]) <= MOST_POINTS
    assert dict(zip(trace["x"], trace["y"], strict=True))[31_415] == 9.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_every_value_within_the_bins_is_counted_once(values):
    (trace,) = histogram("t", "s", [Sample("a", values)], x="ms").figure["data"]
    inside = sum(value <= trace["x"][-1] for value in values)
    assert len(trace["x"]) == len(trace["y"])
    assert sum(trace["y"]) == pytest.approx(100 * inside / len(values), abs=0.01)
    assert inside >= 0.9 * len(values) - 2


def test_an_instance_has_its_colour_in_every_chart():
    line = Line(name="instance 3", xs=[0, 1], ys=[1, 2], index=3)
    (drawn,) = lines("t", "s", [line], x="x", y="y").figure["data"]
    (counted,) = histogram("t", "s", [Sample("instance 3", [1, 2], 3)], x="x").figure["data"]
    assert drawn["line"]["color"] == counted["line"]["color"]


@pytest.mark.parametrize(("seconds", "unit", "last"), [
    (299.0, "seconds", 299.0), (600.0, "minutes", 10.0), (36_000.0, "hours", 10.0),
])  # fmt: skip
def test_time_has_the_unit_of_the_longest_line(seconds, unit, last):
    series = [Line(name="a", xs=[0.0, seconds], ys=[1, 2]), Line(name="b", xs=[], ys=[])]
    marks = [Mark(seconds / 2, "attempt 2"), Mark(7.0, "target", of_y=True)]
    figure = over_time("t", "s", series, y="loss", marks=marks).figure
    assert figure["layout"]["xaxis"]["title"]["text"] == f"{unit} since the run began"
    assert figure["data"][0]["x"] == [0.0, last]
    assert figure["layout"]["shapes"][0]["x0"] == last / 2
    assert figure["layout"]["shapes"][1]["y0"] == 7.0


VALUES = st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=400)
MOST = st.integers(min_value=5, max_value=60)


def finite(values):
    return [v for v in values if v is not None and math.isfinite(v)]


@given(VALUES, MOST)
def test_thinning_keeps_the_order_and_the_limit(ys, most):
    kept = thinned(ys, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert all(0 <= index < len(ys) for index in kept)
    assert kept == list(range(len(ys))) or len(ys) > most


@given(VALUES, MOST)
def test_thinning_keeps_extremes_and_ends(ys, most):
    kept = thinned(ys, most)
    if ys:
        assert {kept[0], kept[-1]} == {0, len(ys) - 1}
    inner, left = finite(ys[1:-1]), finite([ys[index] for index in kept])
    if inner:
        assert min(left) <= min(inner)
        assert max(left) >= max(inner)


@given(st.lists(st.floats(0, 1), min_size=50, max_size=400), st.data())
def test_thinning_keeps_gaps(ys, data):
    at = data.draw(st.integers(1, len(ys) - 2))
    gapped = [*ys[:at], None, *ys[at + 1 :]]
    assert at in thinned(gapped, 20)
