"""The HTML pages of ``poprun-py compare`` and ``poprun-py scale``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from popdist_py.errors import counted
from poprun_py.display.charts import Bars, Line, Mark, bars, lines, over_time, points
from poprun_py.display.formatting import milliseconds_text, number_text
from poprun_py.display.page import (
    Alert,
    Chart,
    Fact,
    Facts,
    Part,
    Section,
    Sentence,
    Table,
    page,
)
from poprun_py.display.tables import Column
from poprun_py.past_runs.comparison import SAMPLES, SECONDS, STEPS, Comparison, RunGroup, Spread
from poprun_py.past_runs.comparison_tables import (
    MEASURES,
    comparison_columns,
    factor,
    percent,
    scaling_columns,
)
from poprun_py.past_runs.measurement import began_at
from poprun_py.past_runs.recorded_run import RecordedRun
from poprun_py.past_runs.training_targets import LOSS, losses

_MOST_VALUES = 24
# The unit of speed that charts show, for each measure of speed.
_UNITS = {SAMPLES: "samples/s", STEPS: "steps/s of all replicas", SECONDS: "s"}


def comparison_page(comparison: Comparison, runs: Sequence[RecordedRun]) -> str:
    """Return the HTML page of a comparison, with charts of the losses and values of ``runs``."""
    columns = comparison_columns(comparison)
    speed: list[Part] = [_table("Runs", columns)]
    if any(each.speed is not None for each in comparison.groups):
        speed.append(_speed_bars(comparison))
    if len({each.instances for each in comparison.groups}) > 1 and _has_speedups(comparison):
        speed.append(_efficiency(comparison))
    sections = [
        Section("Speed", speed),
        Section("Loss", _loss_charts(comparison, runs)),
        Section("Logged values", _value_charts(comparison, runs)),
    ]
    return page(
        f"{len(runs)} runs compared",
        sections,
        lead=f"Against {comparison.base.label}, by {MEASURES[comparison.measure]}.",
        opening=[*_facts(comparison), *map(Alert, comparison.remarks)],
    )


def scaling_page(comparison: Comparison, counts: Sequence[int]) -> str:
    """Return the HTML page of ``poprun-py scale``.

    Args:
        comparison: The comparison of the runs, which are grouped by their number of instances.
        counts: The numbers of instances that the user asked for.
    """
    script, *arguments = comparison.base.runs[0].program or ("",)
    program = " ".join((PurePath(script).name, *arguments))
    parts: list[Part] = [_table("Scaling", scaling_columns(comparison))]
    if _has_speedups(comparison):
        parts += [_speed_points(comparison), _efficiency(comparison)]
    if any("step_seconds" in each.numbers for each in comparison.groups):
        parts.append(_step_points(comparison))
    names = ", ".join(run.name for each in comparison.groups for run in each.runs)
    return page(
        f"Scaling of {program}",
        [Section("Speed by instances", parts), Section("Runs", [Sentence(names)])],
        lead=f"{', '.join(map(str, counts))} instances; median for each number, by "
        f"{MEASURES[comparison.measure]}.",
        opening=[*_facts(comparison), *map(Alert, comparison.remarks)],
    )


# --- facts and table at the top of a page -------------------------------------------------------


def _facts(comparison: Comparison) -> list[Part]:
    """Return the fastest run and the largest run's scaling efficiency, to show on the page."""
    known = [each for each in comparison.groups if each.speed is not None and each.speedup]
    if len(known) < 2:
        return []
    fastest = max(known, key=lambda each: each.speedup or 0.0)
    largest = max(known, key=lambda each: each.instances)
    facts = [Fact("Fastest", factor(fastest.speedup), _description(fastest))]
    if comparison.measure == SAMPLES:
        facts.append(Fact("Samples/s", _cell(fastest.speed), _description(fastest)))
    if largest.instances > comparison.base.instances:
        facts.append(Fact("Scaling efficiency", percent(largest.efficiency), _description(largest)))
    if comparison.scaling:
        facts.append(Fact("Scaling", comparison.scaling, "by the global batch"))
    return [Facts(facts)]


def _description(group: RunGroup) -> str:
    runs = f"median of {len(group.runs)}" if len(group.runs) > 1 else group.label
    return f"{counted(group.instances, 'instance')}, {runs}"


def _table(name: str, columns: Sequence[Column]) -> Table:
    rows = list(zip(*(each.cells for each in columns), strict=True))
    return Table(name, [each.title for each in columns], rows)


def _cell(spread: Spread | None) -> str:
    return "-" if spread is None else number_text(spread.median)


def _has_speedups(comparison: Comparison) -> bool:
    return any(each.speedup is not None for each in comparison.groups[1:])


# --- charts of speed ----------------------------------------------------------------------------


def _speed_bars(comparison: Comparison) -> Chart:
    unit = _UNITS[comparison.measure]
    shown = [(each.label, _values_to_draw(comparison, each)) for each in comparison.groups]
    summary = ", ".join(f"{number_text(speed.median)} of {name}" for name, speed in shown if speed)
    values = [speed.median if speed else None for _, speed in shown]
    return bars(
        _speed_title(comparison),
        f"In {unit}: {summary}.",
        [name for name, _ in shown],
        [Bars(unit, values)],
        unit=unit,
    )


def _speed_title(comparison: Comparison) -> str:
    return "Time of the whole run" if comparison.measure == SECONDS else "Speed"


def _values_to_draw(comparison: Comparison, group: RunGroup) -> Spread | None:
    """Return the speeds of a group's runs for charts, or the durations if no run counts steps."""
    return group.numbers.get("seconds") if comparison.measure == SECONDS else group.speed


def _by_instances(comparison: Comparison) -> list[RunGroup]:
    return sorted(comparison.groups, key=lambda each: each.instances)


def _chart_by_instances(
    title: str, summary: str, series: Sequence[Line], counts: Sequence[int], unit: str
) -> Chart:
    return points(title, summary, series, x="instances", y=unit, x_ticks=counts)


def _speed_points(comparison: Comparison) -> Chart:
    base = _values_to_draw(comparison, comparison.base)
    known = [
        (each, drawn)
        for each in _by_instances(comparison)
        if (drawn := _values_to_draw(comparison, each)) is not None
    ]
    counts = [each.instances for each, _ in known]
    unit = _UNITS[comparison.measure]
    medians = ", ".join(f"{number_text(drawn.median)} with {e.instances}" for e, drawn in known)
    power = -1 if comparison.measure == SECONDS else 1
    ideal = [base.median * comparison.ideal_speedup(e) ** power for e, _ in known] if base else []
    return _chart_by_instances(
        _speed_title(comparison),
        f"In {unit}: {medians} instances; error bars are from the slowest to the fastest run.",
        [
            _median_line("measured", counts, [drawn for _, drawn in known]),
            Line(name="ideal", xs=counts, ys=ideal, is_reference=True),
        ],
        counts,
        unit,
    )


def _median_line(
    name: str, counts: Sequence[int], spreads: Sequence[Spread], scale: float = 1.0
) -> Line:
    errors = [
        ((each.median - each.least) * scale, (each.most - each.median) * scale) for each in spreads
    ]
    return Line(name=name, xs=counts, ys=[each.median * scale for each in spreads], errors=errors)


def _efficiency(comparison: Comparison) -> Chart:
    known = [each for each in _by_instances(comparison) if each.efficiency is not None]
    counts = [each.instances for each in known]
    efficiencies = ", ".join(f"{percent(each.efficiency)} with {each.instances}" for each in known)
    measured = [100 * (each.efficiency or 0.0) for each in known]
    return _chart_by_instances(
        "Scaling efficiency",
        f"The speedup divided by the ideal speedup: {efficiencies} instances.",
        [
            Line(name="measured", xs=counts, ys=measured),
            Line(name="ideal", xs=counts, ys=[100.0] * len(counts), is_reference=True),
        ],
        counts,
        "%",
    )


def _step_points(comparison: Comparison) -> Chart:
    known = [each for each in _by_instances(comparison) if "step_seconds" in each.numbers]
    spreads = [each.numbers["step_seconds"] for each in known]
    counts = [each.instances for each in known]
    medians = ", ".join(
        f"{milliseconds_text(spread.median)} with {count}"
        for count, spread in zip(counts, spreads, strict=True)
    )
    return _chart_by_instances(
        "Time of a step",
        f"The median of the steady steps: {medians} instances.",
        [_median_line("step", counts, spreads, scale=1e3)],
        counts,
        "ms",
    )


# --- charts of the loss and of logged values ----------------------------------------------------


def _loss_charts(comparison: Comparison, runs: Sequence[RecordedRun]) -> list[Part]:
    """Return charts of the losses over time and over samples (or steps if samples are unknown)."""
    batches = {run.name: run.batch for each in comparison.groups for run in each.runs}
    by_samples = all(batches.get(run.run_id) for run in runs)
    over_seconds, over_steps, last = [], [], []
    for index, run in enumerate(runs):
        found = [each for attempt in run.attempts for each in losses(attempt)]
        if not found:
            continue
        began = began_at(run) or 0.0
        values = [loss for _, _, loss in found]
        line = Line(name=run.run_id, xs=[at - began for at, _, _ in found], ys=values, index=index)
        size = (batches[run.run_id] or 0.0) if by_samples else 1
        over_seconds.append(line)
        over_steps.append(replace(line, xs=[step * size for _, step, _ in found]))
        last.append(f"{number_text(values[-1])} of {run.run_id}")
    if not last:
        return []
    summary = f"The last loss: {', '.join(last)}."
    title, x = ("Loss over samples", "samples") if by_samples else ("Loss over steps", "step")
    return [
        over_time("Loss over time", summary, over_seconds, y="loss"),
        lines(title, summary, over_steps, x=x, y="loss"),
    ]


def _value_charts(comparison: Comparison, runs: Sequence[RecordedRun]) -> list[Part]:
    """Return a chart over time for each logged value except the loss."""
    values = (each.values for run in runs for attempt in run.attempts for each in attempt.values)
    names = sorted({name for each in values for name in each} - {LOSS})
    target = comparison.target
    parts: list[Part] = []
    for name in names[:_MOST_VALUES]:
        marks = []
        if target is not None and target.name == name:
            marks.append(Mark(target.bound, str(target), of_y=True))
        series = [_values_line(run, name, index) for index, run in enumerate(runs)]
        known = [line for line in series if line.ys]
        summary = ", ".join(f"{number_text(line.ys[-1] or 0.0)} of {line.name}" for line in known)
        parts.append(over_time(name, f"The last: {summary}.", known, y=name, marks=marks))
    if len(names) > _MOST_VALUES:
        parts.append(Sentence(f"Not drawn: {counted(len(names) - _MOST_VALUES, 'more value')}."))
    return parts


def _values_line(run: RecordedRun, name: str, index: int) -> Line:
    began = began_at(run) or 0.0
    logged = [each for attempt in run.attempts for each in attempt.values if name in each.values]
    xs, ys = [each.at - began for each in logged], [each.values[name] for each in logged]
    return Line(name=run.run_id, xs=xs, ys=ys, index=index)
