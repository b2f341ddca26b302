"""Some steps of a run's timeline, a row for each row of the trace. Pure; nothing here reads it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from poprun_py.html.chart_colours import NEUTRAL, NUM_COLOURS, series_colour
from poprun_py.html.charts import bars, plotly_text
from poprun_py.html.page import Chart, Section, Sentence
from poprun_py.past_runs.trace_excerpt import Excerpt, TraceSpan
from poprun_py.texts import duration_text, milliseconds_text

# A bar, and one that lies within it.
_THICK, _THINNER, _THIN = 0.86, 0.24, 0.2
_MOST_ROWS: Final = 40


def timeline_section(excerpt: Excerpt, trace: Path) -> Section:
    """Return the excerpt as a chart, and where the whole trace is."""
    rows = list(dict.fromkeys(span.row for span in excerpt.spans))
    whole = Sentence(f"The whole timeline is {trace}: open it at ui.perfetto.dev.")
    return Section("Timeline", (_chart(excerpt, rows[:_MOST_ROWS]), whole))


def _chart(excerpt: Excerpt, rows: list[str]) -> Chart:
    steps = f"{excerpt.num_steps} steps" if excerpt.num_steps > 1 else "One step"
    told = (
        f"{steps} of instance 0 from the middle, {milliseconds_text(excerpt.seconds)} long, "
        f"{duration_text(excerpt.at)} after the timeline begins; time runs to the right."
    )
    frame = bars("Some steps", told, rows, [], unit="ms")
    drawn = [span for span in excerpt.spans if span.row in set(rows)]
    total: dict[str, float] = defaultdict(float)
    for span in drawn:
        total[span.name] += span.seconds
    ranked = sorted(total, key=lambda name: -total[name])
    data = [
        _trace(name, [span for span in drawn if span.name == name], ranked.index(name))
        # What lies within others is drawn after them.
        for name in sorted(
            ranked, key=lambda name: min(span.depth for span in drawn if span.name == name)
        )
    ]
    layout = {**frame.figure["layout"], "barmode": "overlay", "hovermode": "closest"}
    layout["showlegend"] = True
    layout["yaxis"] = {
        **layout["yaxis"],
        "categoryorder": "array",
        "categoryarray": [plotly_text(row) for row in rows],
        "showgrid": True,
    }
    layout["xaxis"] = {**layout["xaxis"], "range": [0, excerpt.seconds * 1e3]}
    return Chart(frame.title, frame.summary, {"data": data, "layout": layout}, frame.height)


def _trace(name: str, spans: list[TraceSpan], rank: int) -> dict[str, Any]:
    is_other = name == "step" or rank >= 2 * NUM_COLOURS
    return {
        "type": "bar",
        "name": plotly_text(name),
        "orientation": "h",
        "base": [round(span.begin * 1e3, 4) for span in spans],
        "x": [round(span.seconds * 1e3, 4) for span in spans],
        "y": [plotly_text(span.row) for span in spans],
        "width": [max(_THIN, _THICK - _THINNER * span.depth) for span in spans],
        "marker": {
            "color": NEUTRAL if is_other else series_colour(rank),
            "pattern": {"shape": "/" if rank >= NUM_COLOURS and not is_other else ""},
            "line": {"width": 0},
        },
        "hovertemplate": "%{y}<br>%{x:.4~g} ms",
    }
