"""Where the time of the instances went, and what they used: activities, CPUs, memory.

Pure: looks at a job in, sections out. Nothing here reads files or writes HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from poprun_py.html.chart_colours import LIGHT, NEUTRAL, series_colour
from poprun_py.html.charts import Bars, Line, bars, over_time
from poprun_py.html.page import Beside, Chart, Section
from poprun_py.past_runs.pages.training_sections import chosen, restarts
from poprun_py.past_runs.recorded_run import RecordedRun
from poprun_py.running.watch.instance_state import ACTIVITIES, InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.texts import bytes_text, number_text

# The colour of an activity, and whether it is hatched.
_LOOKS: Final = {
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
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


def where_time_went(view: JobView | None) -> Section:
    """Return the shares of the activities of each instance, since the program began."""
    states = [state for state in view.instances if any(_times(state))] if view else []
    if not states:
        return Section("Where time went", ())
    shown = chosen(state.index for state in states)
    states = [state for state in states if state.index in shown]
    shares = {
        name: [_times(state)[i] / sum(_times(state)) for state in states]
        for i, name in enumerate(ACTIVITIES)
    }
    mean = {name: sum(values) / len(values) for name, values in shares.items()}
    most = sorted(mean, key=lambda name: -mean[name])[:3]
    told = ", ".join(f"{name} {mean[name]:.0%}" for name in most)
    chart = bars(
        "Activities of each instance",
        f"On average {told}. Other is the program's own code between calls.",
        [f"instance {state.index}" for state in states],
        [
            Bars(name, [share * 100 for share in shares[name]], colour, is_hatched=is_hatched)
            for name, (colour, is_hatched) in _LOOKS.items()
            if max(shares[name]) >= _LEAST_SHARE
        ],
        unit="% of the time since the program began",
    )
    return Section("Where time went", (chart,))


def _times(state: InstanceState) -> Sequence[float]:
    """Return the time of the activities; their shares where only these are known."""
    return state.seconds if any(state.seconds) else state.shares


def resource_section(run: RecordedRun, began: float) -> Section:
    """Return CPUs and memory over time, from the looks at the job."""
    shown = chosen(s.index for a in run.attempts for _, view in a.looks for s in view.instances)
    if sum(len(attempt.looks) for attempt in run.attempts) < 2:
        return Section("CPU and memory", ())
    states = [s for attempt in run.attempts for _, v in attempt.looks for s in v.instances]
    busiest = max(states, key=lambda state: state.cpu)
    largest = max(states, key=lambda state: state.memory_bytes)
    size, unit = (_GIB, "GiB") if largest.memory_bytes >= _GIB else (_MIB, "MiB")
    of_cpus = f" of its {busiest.num_cpus}" if busiest.num_cpus else ""
    charts = (
        _over_time(
            run, began, shown, lambda state: state.cpu, "CPUs in use", "CPUs",
            f"At most {number_text(busiest.cpu)}{of_cpus} by instance {busiest.index}.",
        ),
        _over_time(
            run, began, shown, lambda state: state.memory_bytes / size, "Memory", unit,
            f"At most {bytes_text(largest.memory_bytes)} by instance {largest.index}.",
        ),
    )  # fmt: skip
    return Section("CPU and memory", (Beside(charts),))


def _over_time(
    run: RecordedRun,
    began: float,
    shown: Sequence[int],
    value: Callable[[InstanceState], float],
    title: str,
    unit: str,
    told: str,
) -> Chart:
    series = []
    for index in shown:
        xs: list[float] = []
        ys: list[float | None] = []
        for attempt in run.attempts:
            if xs and attempt.looks:
                xs.append(attempt.looks[0][0] - began)
                ys.append(None)
            for at, view in attempt.looks:
                state = next((s for s in view.instances if s.index == index), None)
                if state is not None:
                    xs.append(round(at - began, 3))
                    ys.append(round(value(state), 4))
        series.append(Line(name=f"instance {index}", xs=xs, ys=ys, index=index))
    return over_time(title, told, series, y=unit, marks=restarts(run, began), from_zero=True)
