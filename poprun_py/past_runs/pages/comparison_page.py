"""The HTML pages of ``poprun-py compare`` and ``poprun-py scale``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from popdist_py.errors import counted
from popdist_py.html_pages.charts import Bars, Line, Mark, bars, lines, over_time, points
from popdist_py.html_pages.page import (
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
from poprun_py.display.formatting import milliseconds_text, number_text
from poprun_py.display.tables import Column
from poprun_py.past_runs.comparison import SAMPLES, SECONDS, Comparison, RunGroup, Spread
from poprun_py.past_runs.comparison_tables import (
    MARK,
    comparison_columns,
    comparison_doubts,
    factor,
    percent,
    scaling_columns,
    scaling_doubts,
)
from poprun_py.past_runs.measured_run import LOSS, logged, losses
from poprun_py.past_runs.pages.phase_sections import training_began_at
from poprun_py.past_runs.pages.training_sections import TRAINING_BEGAN
from poprun_py.past_runs.recorded_run import RecordedAttempt, RecordedRun

_MOST_VALUES = 24


def comparison_page(comparison: Comparison, runs: Sequence[RecordedRun]) -> str:
    """Return the HTML page of a comparison, with charts of losses and logged values of ``runs``."""
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
        lead=f"Compared with {comparison.base.label}, by {comparison.measure.description}.",
        opening=_opening(comparison, comparison_doubts(comparison)),
    )


def scaling_page(comparison: Comparison, counts: Sequence[int]) -> str:
    """Return the page of ``poprun-py scale``, which ran a program with ``counts`` instances."""
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
        lead=f"With {', '.join(map(str, counts))} instances. Each row of the table is the median "
        f"of its runs, by {comparison.measure.description}.",
        opening=_opening(comparison, scaling_doubts(comparison)),
    )


# --- facts and table at the top of a page -------------------------------------------------------


def _opening(comparison: Comparison, doubts: Sequence[str]) -> list[Part]:
    remarks = map(Alert, (*doubts, *comparison.remarks))
    known = [each for each in comparison.groups if each.speed is not None and each.speedup]
    if len(known) < 2:
        return [*remarks]
    fastest = max(known, key=lambda each: each.speedup or 0.0)
    largest = max(known, key=lambda each: each.instances)
    marked = {True: MARK, False: ""}
    speedup = factor(fastest.speedup) + marked[comparison.is_doubtful(fastest)]
    facts = [Fact("Fastest", speedup, _description(fastest))]
    if comparison.measure is SAMPLES and fastest.speed is not None:
        rate = number_text(fastest.speed.median)
        facts.append(Fact("Samples/s", rate, _description(fastest)))
    if largest.instances > comparison.base.instances:
        efficiency = percent(largest.efficiency) + marked[comparison.is_doubtful(largest)]
        facts.append(Fact("Scaling efficiency", efficiency, _description(largest)))
    if comparison.scaling:
        facts.append(Fact("Scaling", comparison.scaling, "by the global batch"))
    return [Facts(facts), *remarks]


def _description(group: RunGroup) -> str:
    runs = f"median of {len(group.runs)}" if len(group.runs) > 1 else group.label
    return f"{counted(group.instances, 'instance')}, {runs}"


def _table(name: str, columns: Sequence[Column]) -> Table:
    rows = list(zip(*(each.cells for each in columns), strict=True))
    return Table(name, [each.title for each in columns], rows)


def _has_speedups(comparison: Comparison) -> bool:
    return any(each.speedup is not None for each in comparison.groups[1:])


# --- charts of speed ----------------------------------------------------------------------------


def _speed_title(comparison: Comparison) -> str:
    return "Time of the whole run" if comparison.measure is SECONDS else "Speed"


def _speed_bars(comparison: Comparison) -> Chart:
    unit = comparison.measure.unit
    # Two groups may have equal labels, because a copy of a run has the name of that run.
    shown = [(each.label, comparison.shown_speed(each)) for each in comparison.groups]
    summary = ", ".join(f"{number_text(speed.median)} of {name}" for name, speed in shown if speed)
    return bars(
        _speed_title(comparison),
        f"In {unit}: {summary}.",
        [name for name, _ in shown],
        [Bars(unit, [speed.median if speed else None for _, speed in shown])],
        unit=unit,
    )


def _speed_points(comparison: Comparison) -> Chart:
    unit = comparison.measure.unit
    known = _by_instances(comparison, comparison.shown_speed)
    base = comparison.shown_speed(comparison.base)
    power = -1 if comparison.measure is SECONDS else 1
    start = comparison.base.instances
    ideal = [base.median * (count / start) ** power for count, _ in known] if base else []
    summary = (
        f"In {unit}: {_medians(known, number_text)} instances; error bars are from the slowest to "
        "the fastest run."
    )
    return _chart_by_instances(
        _speed_title(comparison), summary, _median_line("measured", known), unit, ideal
    )


def _efficiency(comparison: Comparison) -> Chart:
    known = _by_instances(comparison, lambda each: Spread.of([each.efficiency]))
    line = replace(_median_line("measured", known, scale=100), errors=())
    summary = f"The speedup divided by the ideal speedup: {_medians(known, percent)} instances."
    return _chart_by_instances("Scaling efficiency", summary, line, "%", [100.0] * len(known))


def _step_points(comparison: Comparison) -> Chart:
    known = _by_instances(comparison, lambda each: each.numbers.get("step_seconds"))
    line = _median_line("step", known, scale=1e3)
    summary = f"The median of the steady steps: {_medians(known, milliseconds_text)} instances."
    return _chart_by_instances("Time of a step", summary, line, "ms")


def _by_instances(
    comparison: Comparison, quantity: Callable[[RunGroup], Spread | None]
) -> list[tuple[int, Spread]]:
    groups = sorted(comparison.groups, key=lambda each: each.instances)
    return [(each.instances, spread) for each in groups if (spread := quantity(each)) is not None]


def _medians(known: Sequence[tuple[int, Spread]], show: Callable[[float], str]) -> str:
    return ", ".join(f"{show(spread.median)} with {count}" for count, spread in known)


def _median_line(name: str, known: Sequence[tuple[int, Spread]], scale: float = 1.0) -> Line:
    return Line(
        name=name,
        xs=[count for count, _ in known],
        ys=[spread.median * scale for _, spread in known],
        errors=[
            ((each.median - each.least) * scale, (each.most - each.median) * scale)
            for _, each in known
        ],
    )


def _chart_by_instances(
    title: str, summary: str, line: Line, unit: str, ideal: Sequence[float] = ()
) -> Chart:
    series = [line]
    if ideal:
        series.append(Line(name="ideal", xs=line.xs, ys=ideal, is_reference=True))
    ticks = [int(x) for x in line.xs]
    return points(title, summary, series, x="instances", y=unit, x_ticks=ticks)


# --- charts of the loss and of logged values ----------------------------------------------------


def _loss_charts(comparison: Comparison, runs: Sequence[RecordedRun]) -> list[Part]:
    batches = {run.name: run.batch or 0.0 for each in comparison.groups for run in each.runs}
    by_samples = all(batches.get(run.run_id) for run in runs)

    def samples_at(run: RecordedRun, _at: float, step: int) -> float:
        return step * batches[run.run_id] if by_samples else step

    seconds_at, since = _time_axis(runs)
    series = _lines(runs, losses, seconds_at)
    if not series:
        return []
    summary = f"The last losses: {_last(series)}."
    title, x = ("Loss over samples", "samples") if by_samples else ("Loss over steps", "step")
    return [
        over_time("Loss over time", summary, series, y="loss", since=since),
        lines(title, summary, _lines(runs, losses, samples_at), x=x, y="loss"),
    ]


def _value_charts(comparison: Comparison, runs: Sequence[RecordedRun]) -> list[Part]:
    values = (each.values for run in runs for attempt in run.attempts for each in attempt.values)
    names = sorted({name for each in values for name in each} - {LOSS})
    target = comparison.target
    seconds_at, since = _time_axis(runs)
    parts: list[Part] = []
    for name in names[:_MOST_VALUES]:
        marks = []
        if target is not None and target.name == name:
            marks.append(Mark(target.bound, str(target), of_y=True))
        series = _lines(runs, partial(logged, name=name), seconds_at)
        last = f"The last values: {_last(series)}."
        parts.append(over_time(name, last, series, y=name, marks=marks, since=since))
    if len(names) > _MOST_VALUES:
        parts.append(
            Sentence(
                f"{counted(len(names) - _MOST_VALUES, 'more logged value')} "
                f"{'is' if len(names) - _MOST_VALUES == 1 else 'are'} not drawn."
            )
        )
    return parts


def _lines(
    runs: Sequence[RecordedRun],
    values_of: Callable[[RecordedAttempt], list[tuple[float, int, float]]],
    x_of: Callable[[RecordedRun, float, int], float],
) -> list[Line]:
    """Return a chart line for each run; ``x_of`` computes x from the time and step of a value."""
    series = []
    for index, run in enumerate(runs):
        found = [each for attempt in run.attempts for each in values_of(attempt)]
        if found:
            xs, ys = [x_of(run, at, step) for at, step, _ in found], [each[2] for each in found]
            series.append(Line(name=run.run_id, xs=xs, ys=ys, index=index))
    return series


def _time_axis(
    runs: Sequence[RecordedRun],
) -> tuple[Callable[[RecordedRun, float, int], float], str]:
    """Return a function for the position of a time on the time axis, and the begin of the axis.

    If all runs have steps, times count from the first step, so that other imports or another queue
    do not move the lines of two equal trainings apart.
    """
    begins = {id(run): training_began_at(run) for run in runs}
    have_steps = all(begin is not None for begin in begins.values())

    def seconds_at(run: RecordedRun, at: float, _step: int) -> float:
        began = begins[id(run)] if have_steps else run.began_at
        return at - (began or 0.0)

    return seconds_at, TRAINING_BEGAN if have_steps else "the run began"


def _last(series: Sequence[Line]) -> str:
    return ", ".join(f"{number_text(line.ys[-1] or 0.0)} of {line.name}" for line in series)
