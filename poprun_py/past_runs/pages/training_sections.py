"""Page sections about throughput, loss, logged values and step times of a training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from popdist_py.errors import plural
from popdist_py.html_pages.chart_colours import NEUTRAL, series_colour
from popdist_py.html_pages.charts import Bars, Line, Mark, Sample, bars, histogram, lines, over_time
from popdist_py.html_pages.page import Chart, ChartRow, Fact, Part, Section, Sentence, Table
from poprun_py.display.formatting import milliseconds_text, number_text
from poprun_py.past_runs.measured_run import logged
from poprun_py.past_runs.recorded_run import RecordedRun, seconds_since_epoch
from poprun_py.running.watch.instance_state import median, percentile
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import Straggler, slowest_by_medians, waited_for

# The number of time windows in a chart of throughput; each point is the mean of one window.
_WINDOWS = 200
_MOST_LINES, _MOST_HISTOGRAMS, _MOST_VALUES = 64, 8, 12
_P95 = 0.95
# The begin of the time axes on a page. The begin of the first step is not known, but its end.
TRAINING_BEGAN = "the first step"
Point: TypeAlias = tuple[float, float | None]  # x and y in a chart; None for y makes a gap


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The durations of the recorded steps of one instance in all attempts, in seconds.

    Attributes:
        own: The step durations without the time that the instance waited for other instances.
        count: The number of training steps, including steps without a record.
        every: The largest number of training steps that one record stands for.
    """

    instance: int
    seconds: tuple[float, ...]
    own: tuple[float, ...]
    count: int
    every: int

    @property
    def medians(self) -> tuple[float, float]:
        """The median step duration without waiting for other instances, and with waiting."""
        return median(self.own), median(self.seconds)

    @property
    def p95(self) -> float:
        """The 95th percentile of the step durations, in seconds."""
        return percentile(self.seconds, _P95)


def step_times(run: RecordedRun) -> list[StepTimes]:
    """Return the step times of each instance that has timed steps, sorted by instance."""
    timed: defaultdict[int, list[StepRecord]] = defaultdict(list)
    for attempt in run.attempts:
        for record in attempt.steps:
            if record.is_timed:
                timed[record.instance].append(record)
    return [
        StepTimes(
            index,
            tuple(record.seconds for record in records),
            tuple(record.own_seconds for record in records),
            sum(record.every for record in records),
            max(record.every for record in records),
        )
        for index, records in sorted(timed.items())
    ]


def training_facts(
    run: RecordedRun, times: Sequence[StepTimes], view: JobView | None
) -> list[Fact]:
    """Return the page's facts about training speed, step time and the slowest instance."""
    facts = []
    trained = [attempt for attempt in run.attempts if attempt.steps]
    by_instance = trained[-1].steps_by_instance() if trained else {}
    rate = sum(_rate(steps, has_samples=True) for steps in by_instance.values())
    if rate := rate or (view.samples_per_second if view is not None else 0.0):
        total = sum(r.samples * r.every for attempt in trained for r in attempt.steps)
        note = f"{number_text(total)} {plural('sample', total)} in total" if total else ""
        facts.append(Fact("samples/s in total", number_text(rate), note))
    if times:
        middle = milliseconds_text(median([each.medians[1] for each in times]))
        p95 = milliseconds_text(max(each.p95 for each in times))
        facts.append(Fact("step time, median", middle, f"95th percentile {p95}"))
    worst = view.worst if view is not None else None
    if len(times) > 1:
        worst = slowest_by_medians({each.instance: each.medians for each in times})
    if worst is not None:
        facts.append(_slowest_fact(worst))
    return facts


def _slowest_fact(worst: Straggler) -> Fact:
    name = f"instance {worst.instance}"
    note = (
        f"{milliseconds_text(worst.own_seconds)} a step without waiting, median instance "
        f"{milliseconds_text(worst.median_seconds)}"
    )
    if not worst.is_slow:
        return Fact("slowest", "none stands out", f"{name}: {note}")
    return Fact("slowest", name, note)


def restart_marks(run: RecordedRun, began: float) -> list[Mark]:
    """Return chart marks at the starts of restarted attempts, in seconds after ``began``."""
    return [
        Mark(at - began, f"attempt {attempt.number}")
        for attempt in run.attempts[1:]
        if (at := seconds_since_epoch(attempt.report.get("began_at"))) is not None
    ]


def drawn_instances(instances: Iterable[int]) -> list[int]:
    """Return the instances that a chart shows: all instances, or an evenly spaced selection."""
    ordered = sorted(set(instances))
    if len(ordered) <= _MOST_LINES:
        return ordered
    last = len(ordered) - 1
    return [ordered[number * last // (_MOST_LINES - 1)] for number in range(_MOST_LINES)]


def instance_lines(attempts: Sequence[Mapping[int, Sequence[Point]]]) -> list[Line]:
    """Return a chart line for each shown instance, with gaps between attempts.

    Each element of ``attempts`` maps instances to their chart points in one attempt.
    """
    return [
        _line(f"instance {index}", index, [points.get(index, ()) for points in attempts])
        for index in drawn_instances(each for points in attempts for each in points)
    ]


def _line(name: str, index: int, attempts: Iterable[Sequence[Point]]) -> Line:
    points: list[Point] = []
    for found in attempts:
        if points and found:
            points.append((found[0][0], None))
        points += found
    return Line(name=name, xs=[x for x, _ in points], ys=[y for _, y in points], index=index)


# --- throughput, loss and values ----------------------------------------------------------------


def training_section(run: RecordedRun, began: float) -> Section:
    """Return a page section with charts of throughput, loss and logged values."""
    parts: list[Part] = []
    if any(attempt.steps for attempt in run.attempts):
        parts.append(_throughput(run, began))
    values, rest = _values(run)
    if smaller := [*_loss(run), *values]:
        parts.append(ChartRow(smaller))
    if rest:
        parts.append(Sentence(f"The page does not show these logged values: {', '.join(rest)}."))
    return Section("Training", tuple(parts))


def _throughput(run: RecordedRun, began: float) -> Chart:
    has_samples = any(r.samples for attempt in run.attempts for r in attempt.steps)
    unit = "samples/s" if has_samples else "steps/s"
    attempts = [attempt.steps_by_instance() for attempt in run.attempts]
    series = instance_lines(
        [
            {index: _rates(own, began, has_samples=has_samples) for index, own in steps.items()}
            for steps in attempts
        ]
    )
    means = []
    for line in series:
        records = [record for steps in attempts for record in steps.get(line.index, ())]
        means.append((_rate(records, has_samples=has_samples), line.index))
    low, high = min(means), max(means)
    least, most = number_text(low[0]), number_text(high[0])
    summary = f"Instance {high[1]} has {most} {unit} on average"
    if least != most:
        summary += f", the most; instance {low[1]} has the fewest, {least}"
    elif len(means) > 1:
        summary = f"Each instance has {most} {unit} on average"
    return over_time(
        "Throughput of each instance",
        f"{summary}. The time for compiling, validating and saving does not count.",
        series,
        y=unit,
        marks=restart_marks(run, began),
        from_zero=True,
        since=TRAINING_BEGAN,
    )


def _rates(steps: Sequence[StepRecord], began: float, *, has_samples: bool) -> list[Point]:
    timed = [record for record in steps if record.is_timed]
    if not timed:
        return []
    first, last = timed[0].at, timed[-1].at
    width = max(last - first, 1e-9) / _WINDOWS
    rates: list[Point] = []
    for _, records in groupby(timed, lambda record: int((record.at - first) / width)):
        window = list(records)
        at = sum(record.at for record in window) / len(window)
        rates.append((round(at - began, 3), _rate(window, has_samples=has_samples)))
    return rates


def _rate(steps: Sequence[StepRecord], *, has_samples: bool) -> float:
    """Return the mean speed over timed steps: samples per second, or steps per second."""
    timed = [record for record in steps if record.is_timed]
    done = sum(record.samples if has_samples else 1 for record in timed)
    return done / sum(record.seconds for record in timed) if timed else 0.0


def _loss(run: RecordedRun) -> list[Chart]:
    known = {r.instance for attempt in run.attempts for r in attempt.steps if r.loss is not None}
    series = instance_lines(
        [
            {i: [(r.step, r.loss) for r in own] for i, own in by_instance.items() if i in known}
            for by_instance in (attempt.steps_by_instance() for attempt in run.attempts)
        ]
    )
    if not series:
        return []
    last = {line.index: _known(line)[-1] for line in series}
    index, (step, loss) = next(iter(last.items()))
    bad = [index for index, (_, value) in last.items() if not math.isfinite(value)]
    summary = f"At step {step:,} the loss of instance {index} is {number_text(loss)}."
    if bad:
        summary = (
            f"The last loss of {_instances(bad)} is not finite; steps with such a loss are gaps in "
            "the chart."
        )
    return [lines("Loss", summary, series, x="training step", y="loss")]


def _known(line: Line) -> list[tuple[Any, float]]:
    return [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]


def _values(run: RecordedRun) -> tuple[list[Chart], list[str]]:
    """Return charts of some logged values, and the names of the logged values without a chart."""
    names = list(dict.fromkeys(n for a in run.attempts for v in a.values for n in v.values))
    charts = []
    for number, name in enumerate(names[:_MOST_VALUES]):
        values = ([(step, v) for _, step, v in logged(each, name)] for each in run.attempts)
        line = _line(name, number, values)
        known = _known(line)
        summary = f"{number_text(known[-1][1])} at step {known[-1][0]:,}"
        finite = [y for _, y in known if math.isfinite(y)]
        if finite:
            summary += f"; between {number_text(min(finite))} and {number_text(max(finite))}"
        charts.append(lines(name, f"{summary}.", [line], x="training step", y=name))
    return charts, names[_MOST_VALUES:]


# --- step times ---------------------------------------------------------------------------------


def step_time_section(times: Sequence[StepTimes]) -> Section:
    """Return a page section with charts and a table of the step times of all instances."""
    if not times:
        return Section("Step time", ())
    waiting = any(
        own < whole for each in times for own, whole in zip(each.own, each.seconds, strict=True)
    )
    parts: list[Part] = []
    if len(times) > 1 and waiting:
        parts.append(_waiting_chart(times))
    charts = [_histogram("Step time", times, {each.instance: each.seconds for each in times})]
    if waiting:
        own = {each.instance: each.own for each in times}
        charts.append(_histogram("Step time without waiting", times, own))
    parts.append(ChartRow(charts))
    parts.append(_table(times))
    if (every := max(each.every for each in times)) > 1:
        parts.append(
            Sentence(
                f"The chart does not show all of these steps: it shows one of {every} at the end, "
                "and more at the beginning. The longest step may be missing."
            )
        )
    return Section("Step time", parts)


def _waiting_chart(times: Sequence[StepTimes]) -> Chart:
    medians = {each.instance: each.medians for each in times}
    worst, slow = slowest_by_medians(medians), waited_for(medians)
    summary = (
        f"A step of instance {worst.instance} takes {milliseconds_text(worst.own_seconds)} without "
        "waiting, and a step of the median instance takes "
        f"{milliseconds_text(worst.median_seconds)}"
    )
    summary += "; the other instances wait for this instance." if worst.is_slow else "."
    shown = sorted({*drawn_instances(medians), worst.instance})
    own = {index: medians[index][0] * 1e3 for index in shown}
    parts = [
        Bars("own time", [None if i in slow else own[i] for i in shown], series_colour(0)),
        Bars("own time, slow", [own[i] if i in slow else None for i in shown], series_colour(1)),
        Bars(
            "waiting for others",
            [max(0.0, medians[i][1] - medians[i][0]) * 1e3 for i in shown],
            NEUTRAL,
        ),
    ]
    return bars(
        "Waiting for other instances",
        summary,
        [f"instance {index}" for index in shown],
        [part for part in parts if any(part.values)],
        unit="ms a step (medians)",
    )


def _histogram(
    title: str, times: Sequence[StepTimes], values: Mapping[int, Sequence[float]]
) -> Chart:
    """Return a histogram of step times, which shows at most 4 fast and 4 slow instances."""
    ordered = sorted(times, key=lambda each: median(values[each.instance]))
    half = _MOST_HISTOGRAMS // 2
    shown = ordered if len(ordered) <= _MOST_HISTOGRAMS else ordered[:half] + ordered[-half:]
    every = [value for sample in values.values() for value in sample]
    middle, p95 = median(every), percentile(every, _P95)
    few = (
        f" The chart shows the {half} fastest and the {half} slowest instances."
        if shown is not ordered
        else ""
    )
    return histogram(
        title,
        f"Median {milliseconds_text(middle)}, 95th percentile {milliseconds_text(p95)}, longest "
        f"{milliseconds_text(max(every))}.{few}",
        [
            Sample(
                f"instance {each.instance}",
                [value * 1e3 for value in values[each.instance]],
                each.instance,
            )
            for each in sorted(shown, key=lambda each: each.instance)
        ],
        x="ms",
        marks=[Mark(middle * 1e3, "median", is_left=True), Mark(p95 * 1e3, "p95")],
    )


def _table(times: Sequence[StepTimes]) -> Table:
    slow = waited_for({each.instance: each.medians for each in times})
    rows = []
    for each in times:
        own, whole = each.medians
        durations = (whole, each.p95, max(each.seconds), own)
        rows.append((str(each.instance), f"{each.count:,}", *map(milliseconds_text, durations)))
    return Table(
        "Step times",
        ("instance", "steps", "median", "p95", "longest", "median without waiting"),
        rows,
        frozenset(i for i, each in enumerate(times) if each.instance in slow),
    )


def _instances(indices: Sequence[int]) -> str:
    *names, last = (f"instance {index}" for index in indices)
    return f"{', '.join(names)} and {last}" if names else last
