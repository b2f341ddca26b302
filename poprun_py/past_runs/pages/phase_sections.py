"""The times of a run before, in and after its training, for the run's page.

The times on the page count from the start of the training, so that neither a queue for cores nor
the imports of a program change the look of its training. A training starts at the end of the first
step, because the begin of the first step is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from popdist_py.html_pages.chart_colours import LIGHT, NEUTRAL, series_colour
from popdist_py.html_pages.charts import Bars, bars
from popdist_py.html_pages.page import Chart, Fact
from poprun_py.display.formatting import duration_text
from poprun_py.past_runs.pages.training_sections import drawn_instances
from poprun_py.past_runs.recorded_run import RecordedRun
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import Phases

_QUEUE, _LAUNCH, _IMPORTS = "queue for cores and IPUs", "launch", "imports"
_IMPORTS_AND_MORE, _PREPARATION = "imports and preparation", "preparation"
_TRAINING, _END = "training", "after the last step"
# The parts of a run in their order, with their colours, and whether their bars are hatched.
_STYLES: Final = {
    _QUEUE: (NEUTRAL, True),
    _LAUNCH: (NEUTRAL, False),
    _IMPORTS: (series_colour(3), False),
    _IMPORTS_AND_MORE: (series_colour(3), True),
    "compiling": (series_colour(4), False),
    "loading": (series_colour(1), False),
    "validating": (series_colour(0), True),
    "saving": (series_colour(2), True),
    _PREPARATION: (series_colour(5), False),
    _TRAINING: (series_colour(0), False),
    _END: (LIGHT["grid"], False),
}
_NAMED_BEFORE_STEPS: Final = ("compiling", "loading", "validating", "saving")
# A part of a run is shown if it takes at least this fraction of the run.
_LEAST_SHARE: Final = 0.005


def training_began_at(run: RecordedRun) -> float | None:
    """Return when the training started, in seconds since the epoch; None for a run without steps.

    Later attempts continue the training of the first attempt with steps.
    """
    with_steps = (attempt.steps for attempt in run.attempts if attempt.steps)
    times = (step.at for step in next(with_steps, ()))
    return min(filter(math.isfinite, times), default=None)


def parts_of_run(phases: Phases, queue_seconds: float = 0.0) -> dict[str, float]:
    """Return the seconds of each part of an instance's life, in order; the names are for users.

    If a program has not counted its time, the only parts are the queue and the launch.
    """
    imports = _IMPORTS if phases.has_joined else _IMPORTS_AND_MORE
    before = dict(phases.before_steps)
    named = {name: before.pop(name, 0.0) for name in _NAMED_BEFORE_STEPS}
    parts = {
        _QUEUE: queue_seconds,
        _LAUNCH: phases.launch,
        imports: phases.imports or 0.0,
        **named,
        _PREPARATION: sum(before.values()),
        _TRAINING: sum(phases.in_steps.values()),
        _END: sum(phases.after_steps.values()),
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def queue_seconds(run: RecordedRun) -> float:
    """Return for how long the run waited for cores and IPUs that other jobs held."""
    waits = [attempt.report.get("queue_seconds") or 0.0 for attempt in run.attempts]
    return float(sum(waits))


def training_fact(run: RecordedRun, view: JobView | None) -> list[Fact]:
    """Return a fact with the duration of the training, and of all that came before it."""
    mean = _mean(_parts(run, view))
    if _TRAINING not in mean:
        return []
    before = list(mean)[: list(mean).index(_TRAINING)]
    note = ", ".join(f"{name} {duration_text(mean[name])}" for name in before)
    note = f"before it: {note}" if note else ""
    return [Fact("training", duration_text(mean[_TRAINING]), note)]


def phase_chart(run: RecordedRun, view: JobView | None) -> list[Chart]:
    """Return a chart with the parts of each instance's life, from the queue to its end."""
    parts = _parts(run, view)
    if not parts:
        return []
    mean = _mean(parts)
    shown = {index: parts[index] for index in drawn_instances(parts)}
    summary = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in mean.items())
    attempt = f" (attempt {len(run.attempts)})" if len(run.attempts) > 1 else ""
    return [
        bars(
            f"From the launch to the end{attempt}",
            f"On average: {summary}.",
            [f"instance {index}" for index in shown],
            [
                Bars(name, [own.get(name, 0.0) for own in shown.values()], *_STYLES[name])
                for name in mean
            ],
            unit="seconds",
        )
    ]


def _parts(run: RecordedRun, view: JobView | None) -> dict[int, dict[str, float]]:
    """Return the parts of each instance's life; empty if no instance has counted its time."""
    queue = queue_seconds(run)
    return {
        state.index: parts_of_run(state.phases, queue)
        for state in (view.instances if view is not None else ())
        if state.phases is not None and state.phases.imports is not None
    }


def _mean(parts: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each part, in order, without parts that take hardly any time.

    The training is always among them, because the page is about it.
    """
    every: Sequence[Mapping[str, float]] = list(parts.values())
    mean = {
        name: sum(own.get(name, 0.0) for own in every) / len(every) for name in _STYLES if every
    }
    least = _LEAST_SHARE * sum(mean.values())
    return {
        name: seconds
        for name, seconds in mean.items()
        if seconds > least or (name == _TRAINING and seconds)
    }
