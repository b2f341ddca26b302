"""Page sections about the time, CPUs, memory and emulated IPUs that a run used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from popdist_py.errors import plural
from popdist_py.html_pages.chart_colours import LIGHT, NEUTRAL, series_colour
from popdist_py.html_pages.charts import Bars, Mark, bars, over_time
from popdist_py.html_pages.page import Chart, ChartRow, Part, Section, Sentence, SvgImage
from poprun_py.display.formatting import bytes_text, milliseconds_text, number_text
from poprun_py.past_runs.pages.training_sections import (
    TRAINING_BEGAN,
    Point,
    drawn_instances,
    instance_lines,
    restart_marks,
)
from poprun_py.past_runs.recorded_run import RecordedRun
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES

# The colour of each activity in charts, and whether its bar is hatched.
_ACTIVITY_STYLES: Final = {
    "computing": (series_colour(0), False),
    "transferring": (series_colour(2), False),
    "updating": (series_colour(5), False),
    "loading": (series_colour(1), False),
    "reducing": (series_colour(3), False),
    "waiting": (NEUTRAL, False),
    "compiling": (series_colour(4), False),
    "validating": (series_colour(0), True),
    "saving": (series_colour(2), True),
    "other": (LIGHT["grid"], False),
}
_LEAST_SHARE: Final = 0.001
_SINCE_BEGIN: Final = "since the program began"
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# A chart marks the capacity of an IPU only if a model needs more than this fraction of the IPU's
# memory.
_NEAR_CAPACITY: Final = 0.2


def activity_section(view: JobView | None, phases: Sequence[Chart] = ()) -> Section:
    """Return a page section with a chart of the time that each instance spent on each activity.

    The chart shows the time in training steps. If a launcher of an older version has recorded the
    run, or if the program has made no steps, the chart shows the time since the program began.

    Args:
        view: The last view of the job.
        phases: The chart of the phases, to which the time in steps belongs.
    """
    states = [state for state in view.instances if any(_times(state))] if view else []
    if not states:
        return Section("Where time went", phases)
    shown = drawn_instances(state.index for state in states)
    states = [state for state in states if state.index in shown]
    in_steps = all(state.phases is not None and state.phases.has_steps for state in states)
    times = [_times_in_steps(state) if in_steps else _times(state) for state in states]
    shares = {name: [own[i] / sum(own) for own in times] for i, name in enumerate(ACTIVITIES)}
    mean = {name: sum(values) / len(values) for name, values in shares.items()}
    most = [name for name in sorted(mean, key=lambda name: -mean[name])[:3] if mean[name] >= 0.005]
    other, where = (
        ("own code", "outside of the library") if in_steps else ("other", "between calls")
    )
    names = {name: other if name == "other" else name for name in mean}
    summary = f"On average {', '.join(f'{names[name]} {mean[name]:.0%}' for name in most)}."
    if mean["other"] >= _LEAST_SHARE:
        summary += f" {other.capitalize()} is the program's own code {where}."
    chart = bars(
        "Activities of each instance",
        summary,
        [f"instance {state.index}" for state in states],
        [
            Bars(names[name], [each * 100 for each in shares[name]], colour, is_hatched=is_hatched)
            for name, (colour, is_hatched) in _ACTIVITY_STYLES.items()
            if max(shares[name]) >= _LEAST_SHARE
        ],
        unit=f"% of the time {'from the first to the last step' if in_steps else _SINCE_BEGIN}",
    )
    return Section("Where time went", (*phases, chart))


def _times_in_steps(state: InstanceState) -> Sequence[float]:
    spent = {} if state.phases is None else state.phases.in_steps
    return [spent.get(name, 0.0) for name in ACTIVITIES]


def _times(state: InstanceState) -> Sequence[float]:
    """Return the time that an instance spent on each activity, in seconds or as fractions."""
    return state.seconds if any(state.seconds) else state.shares


def resource_section(run: RecordedRun, began: float, since: str = TRAINING_BEGAN) -> Section:
    """Return a page section with charts of used CPUs and memory over time.

    ``began`` is the begin of the time axes in seconds since the epoch, and ``since`` is its name.
    """
    if sum(len(attempt.observations) for attempt in run.attempts) < 2:
        return Section("CPU and memory", ())
    states = [s for attempt in run.attempts for _, v in attempt.observations for s in v.instances]

    def chart(
        title: str, summary: str, unit: str, value: Callable[[InstanceState], float]
    ) -> Chart:
        attempts: list[defaultdict[int, list[Point]]] = []
        for attempt in run.attempts:
            points: defaultdict[int, list[Point]] = defaultdict(list)
            for at, view in attempt.observations:
                for state in view.instances:
                    points[state.index].append((round(at - began, 3), round(value(state), 4)))
            attempts.append(points)
        marks = restart_marks(run, began)
        series = instance_lines(attempts)
        return over_time(title, summary, series, y=unit, marks=marks, from_zero=True, since=since)

    busiest = max(states, key=lambda state: state.cpu)
    num_cpus = f" of its {busiest.num_cpus}" if busiest.num_cpus else ""
    cpus = f"At most {number_text(busiest.cpu)}{num_cpus} by instance {busiest.index}."
    largest = max(states, key=lambda state: state.memory_bytes)
    size, unit = (_GIB, "GiB") if largest.memory_bytes >= _GIB else (_MIB, "MiB")
    memory = f"At most {bytes_text(largest.memory_bytes)} by instance {largest.index}."
    charts = (
        chart("CPUs in use", cpus, "CPUs", lambda state: state.cpu),
        chart("Memory", memory, unit, lambda state: state.memory_bytes / size),
    )
    return Section("CPU and memory", (ChartRow(charts),))


# --- emulated IPUs ------------------------------------------------------------------------------


def device_section(run: RecordedRun) -> Section:
    """Return a page section with the memory use of each IPU and the schedule of each model.

    If a model cannot be drawn, for example because its file was edited, the section says so. The
    picture of a schedule is embedded as an image, so that scripts in the picture do not run.
    """
    documents = [attempt.devices for attempt in run.attempts if attempt.devices]
    parts: list[Part] = []
    for _, document in sorted(documents[-1].items())[:1] if documents else ():
        models = document.get("models")
        for model in models if isinstance(models, list) else ():
            try:
                parts += _model(model)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                parts.append(Sentence("A model of the device file cannot be drawn."))
    return Section("Emulated IPUs", tuple(parts))


def _model(model: Mapping[str, Any]) -> Iterator[Part]:
    device, memory = model["device"], model["memory"]
    title = f"{model['name']}, {model['mode']}"
    which = device["name"] if device["is_named"] else f"{device['name']} (assumed)"
    ipus = memory["ipus"]
    fullest = max(ipus, key=lambda own: own["needed"] / own["capacity"])
    summary = (
        f"IPU {fullest['ipu']} of each replica needs {bytes_text(fullest['needed'])} of "
        f"{bytes_text(fullest['capacity'])} ({fullest['needed'] / fullest['capacity']:.0%}) on the "
        f"{which}"
    )
    # Files of older versions do not have the verdict.
    if memory.get("verdict") == "close":
        summary += ": the model is close to the limit."
    else:
        summary += "." if memory["fits"] else ": the model does not fit."
    capacity = min(own["capacity"] for own in ipus)
    needed = max(own["needed"] for own in ipus)
    names = list(dict.fromkeys(name for own in ipus for name in own["by_category"]))
    shown = [name for name in names if any(own["by_category"].get(name) for own in ipus)]
    yield bars(
        f"Memory of each IPU: {title}",
        summary,
        [f"IPU {own['ipu']}" for own in ipus],
        [Bars(name, [own["by_category"].get(name, 0) / _MIB for own in ipus]) for name in shown],
        unit="MiB",
        # A mark far to the right of the bars would stretch the axis and make the bars very short.
        marks=[Mark(capacity / _MIB, "capacity")] if needed > _NEAR_CAPACITY * capacity else [],
    )
    call = model.get("call")
    if call:
        yield Sentence(
            "According to the model of the device, a call takes "
            f"{milliseconds_text(float(call['seconds']))} for "
            f"{number_text(float(call['samples']))} {plural('sample', call['samples'])} on each "
            "replica."
        )
    schedule = model.get("schedule") or {}
    if isinstance(schedule.get("svg"), str) and schedule["svg"]:
        whole = "" if schedule.get("is_whole", True) else " (the first steps)"
        yield SvgImage(schedule["svg"], f"Schedule of {title}{whole}")
