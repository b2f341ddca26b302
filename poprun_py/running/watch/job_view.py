"""Views of a job: as a table, as lines for ``--live``, and as the summary of a finished job.

The package ``rich`` is imported only when a table is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from popdist_py.errors import counted
from poprun_py.display.formatting import bytes_text, number_text
from poprun_py.display.public_values import Displayed
from poprun_py.display.tables import Column, fitted_table, rich_lines
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.phases import Phases
from poprun_py.running.watch.stragglers import Straggler, stands_out

# The seconds between two outputs of --live if the terminal cannot show a panel, and the number of
# rows of a panel that do not show an instance.
_LINE_SECONDS, _PANEL_EXTRA_ROWS = 30.0, 5
_COMPUTING = ("computing", "transferring", "updating")
_PARTS = (
    ("computing", _COMPUTING),
    ("loading", ("loading",)),
    ("reducing", ("reducing",)),
    ("waiting for others", ("waiting",)),
    ("compiling", ("compiling",)),
    ("saving", ("saving",)),
    ("validating", ("validating",)),
    ("other", ("other",)),
)
_STATUS_VERSION = 1
# The ends of sentences about programs without training steps, if the steps of torch's optimizers
# are counted and if POPDIST_COUNT_STEPS turns counting off.
NO_STEPS: Final = (
    "neither called a PopTorch model, nor stepped an optimizer of torch in its main process, nor "
    "called popdist_py.heartbeat.step()"
)
_NOT_COUNTED: Final = (
    "neither called a PopTorch model nor popdist_py.heartbeat.step(), and POPDIST_COUNT_STEPS=no "
    "turns off counting the steps of torch's optimizers"
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobView(Displayed):
    """The state of a job at ``seconds`` seconds after its start.

    ``pid`` is the process id of the launcher. ``worst`` is the slowest instance of the job.
    ``counts_optimizers`` is false if POPDIST_COUNT_STEPS turns off counting optimizer steps.
    """

    run_id: str
    pid: int
    program: str
    seconds: float = 0.0
    instances: tuple[InstanceState, ...] = ()
    worst: Straggler | None = None
    counts_optimizers: bool = True

    def __repr__(self) -> str:
        return (
            f"JobView(run_id={self.run_id!r}, pid={self.pid}, program={self.program!r}, "
            f"seconds={self.seconds:.1f}, instances={len(self.instances)})"
        )

    @property
    def step(self) -> int | None:
        """The highest training step of an instance; None if no instance counts steps."""
        return max((s.step for s in self.instances if s.step is not None), default=None)

    @property
    def has_reported(self) -> bool:
        """Whether the program of any instance has reported an activity, such as a step."""
        return any(state.step or any(state.seconds) for state in self.instances)

    @property
    def why_no_steps(self) -> str:
        """What a program without training steps has done and not done, as the end of a sentence."""
        return NO_STEPS if self.counts_optimizers else _NOT_COUNTED

    @property
    def samples_per_second(self) -> float:
        """The sum of the samples per second of all instances."""
        return sum(state.samples_per_second for state in self.instances)

    def to_json(self) -> dict[str, Any]:
        """Return the job view as JSON values."""
        values: dict[str, Any] = json.loads(self.json_text())
        return values

    def json_text(self, labels: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the job view as JSON text, built from the cached texts of its instance states.

        ``labels`` are further entries of the JSON object, such as the tags of the run.
        """
        head = {
            "version": _STATUS_VERSION,
            "run_id": self.run_id,
            "pid": self.pid,
            "program": self.program,
            **labels,
            "seconds": round(self.seconds, 3),
            "samples_per_second": round(self.samples_per_second, 3),
            "slowest": None if self.worst is None else self.worst.to_json(),
            **({} if self.counts_optimizers else {"counts_optimizers": False}),
        }
        instances = ", ".join([state.json_text() for state in self.instances])
        return f'{json.dumps(head)[:-1]}, "instances": [{instances}]}}'

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobView:
        """Create a job view from JSON values that ``to_json`` returned."""
        worst = data["slowest"]
        return cls(
            run_id=data["run_id"],
            pid=data["pid"],
            program=data["program"],
            seconds=data["seconds"],
            instances=tuple(InstanceState.from_json(each) for each in data["instances"]),
            worst=None if worst is None else Straggler.from_json(worst),
            counts_optimizers=data.get("counts_optimizers", True),
        )


def headline(view: JobView) -> list[str]:
    """Return a line with the job's name and speed, and a line about its slowest instance."""
    rate = f", {number_text(view.samples_per_second)} samples/s" if view.samples_per_second else ""
    first = (
        f"{view.program}: run {view.run_id}, launcher {view.pid}, "
        f"{_duration(view.seconds)}, {counted(len(view.instances), 'instance')}{rate}"
    )
    return [first, *([_slowest(view.worst)] if view.worst is not None else [])]


def table_lines(
    view: JobView,
    *,
    width: int,
    most_rows: int | None = None,
    colour: bool = False,
    with_reason: bool = False,
) -> list[str]:
    """Return text lines with the headline of a job and a table with a row for each instance.

    If the table is wider than ``width`` characters, some of its columns are left out. If there are
    more than ``most_rows`` instances, only the instances with the longest steps are shown. If
    ``colour`` is true, the row of a straggler is coloured. If ``with_reason`` is true, a line says
    why the table shows no steps.
    """
    states: Sequence[InstanceState] = view.instances
    if most_rows is not None and len(states) > most_rows:
        longest = sorted(states, key=lambda state: -state.own_seconds)[: max(most_rows - 1, 1)]
        states = sorted(longest, key=lambda state: state.index)
    columns = [
        Column(
            name, tuple(map(cell, states)), drop_order=drop_order, is_text=name in ("host", "phase")
        )
        for name, cell, drop_order in _COLUMNS
    ]
    worst = view.worst.instance if view.worst is not None and view.worst.is_slow else None
    styles = ["yellow" if state.index == worst else None for state in states]
    table = fitted_table(columns, width=width, row_styles=styles)
    left = len(view.instances) - len(states)
    why = " whose steps are shorter" if any(state.own_seconds for state in states) else ""
    more = [f"and {counted(left, 'more instance')}{why}"] if left else []
    if with_reason and states and not view.has_reported:
        more.append(f"no steps: so far, the program has {view.why_no_steps}")
    return rich_lines(*headline(view), table, *more, width=width, colour=colour)


def summary_lines(view: JobView) -> list[str]:
    """Return five lines that summarise a finished job; no lines if no training step was timed."""
    timed = [state for state in view.instances if state.num_steps]
    if not timed:
        return []
    longest = max(timed, key=lambda state: state.step_seconds)
    parts = _parts_of_time(timed)
    shares = ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= 0.005)
    rate = view.samples_per_second
    steps = sum(1 / s.step_seconds for s in timed if s.step_seconds) / len(timed)
    speed = f"{number_text(rate)} samples/s in total" if rate else f"{number_text(steps)} steps/s"
    peak = max(timed, key=lambda state: state.memory_bytes)
    return [
        f"speed: {speed}, {counted(len(view.instances), 'instance')}, {_duration(view.seconds)}",
        f"step: {_ms(longest.step_seconds)} ms (median), {_ms(longest.p95_seconds)} ms (95th "
        "percentile)",
        f"time: {shares}",
        _slowest(view.worst)
        if view.worst is not None
        else "slowest: the job has only one instance",
        f"use: {sum(s.cpu for s in timed):.1f} CPUs in total, at most "
        f"{bytes_text(peak.memory_bytes)} of memory (instance {peak.index})",
    ]


def _parts_of_time(states: Sequence[InstanceState]) -> dict[str, float]:
    """Return the mean fraction of the time that the instances spent on each part of their work.

    If all instances know their phases, the time is that of the whole program. The program's own
    code is then divided into imports, preparation, the steps and the end.
    """
    known = [state.phases for state in states if state.phases is not None and state.phases.program]
    if len(known) < len(states) or not all(each.has_steps for each in known):
        return {name: sum(s.share(*names) for s in states) / len(states) for name, names in _PARTS}
    parts: dict[str, float] = {}
    for phases in known:
        for name, seconds in _seconds_of_parts(phases):
            parts[name] = parts.get(name, 0.0) + seconds / phases.program / len(known)
    return parts


def _seconds_of_parts(phases: Phases) -> Iterator[tuple[str, float]]:
    spent = (phases.before_steps, phases.in_steps, phases.after_steps)
    for name, activities in _PARTS[:-1]:
        yield name, sum(own.get(each, 0.0) for own in spent for each in activities)
    yield "imports" if phases.has_joined else "imports and preparation", phases.imports or 0.0
    for name, own in zip(("preparation", "own code in steps", "the end"), spent, strict=True):
        yield name, own.get("other", 0.0)


def _slowest(worst: Straggler) -> str:
    if not stands_out(worst.own_seconds, worst.median_seconds):
        return "slowest: no instance stands out"
    reason = f": {worst.reason}" if worst.reason else ""
    return (
        f"slowest: instance {worst.instance} on {worst.host or 'its host'} takes "
        f"{_ms(worst.own_seconds)} ms a step without waiting, and the median instance "
        f"{_ms(worst.median_seconds)} ms{reason}"
    )


def _share(*names: str) -> Callable[[InstanceState], str]:
    return lambda state: f"{state.share(*names):.0%}" if any(state.shares) else ""


def _other_share(state: InstanceState) -> str:
    other = 1.0 - state.share(*_COMPUTING, "loading", "reducing", "waiting")
    return f"{max(0.0, other):.0%}" if any(state.shares) else ""


# For each table column: its name, a function that returns the cell for an instance, and a number.
# On a narrow terminal, columns are left out in the order of their numbers. Columns with number 0
# are always shown.
_COLUMNS: Final[Sequence[tuple[str, Callable[[InstanceState], str], int]]] = (
    ("instance", lambda state: str(state.index), 0),
    ("host", lambda state: state.host, 4),
    ("phase", lambda state: state.phase, 0),
    ("step", lambda state: "" if state.step is None else str(state.step), 10),
    ("samples/s", lambda state: _unless_zero(state.samples_per_second, number_text), 6),
    ("step ms", lambda state: _ms(state.step_seconds) if state.num_steps else "", 0),
    ("p95", lambda state: _ms(state.p95_seconds) if state.num_steps else "", 1),
    ("compute", _share(*_COMPUTING), 9),
    ("load", _share("loading"), 8),
    ("reduce", _share("reducing"), 7),
    ("wait", _share("waiting"), 0),
    ("other", _other_share, 2),
    ("CPU", lambda state: f"{state.cpu:.1f}" if state.memory_bytes else "", 3),
    ("memory", lambda state: _unless_zero(state.memory_bytes, bytes_text), 5),
)
COLUMNS = tuple(name for name, _, _ in _COLUMNS)


def row_of(state: InstanceState) -> list[str]:
    """Return the table cells of an instance, in the order of ``COLUMNS``."""
    return [cell(state) for _, cell, _ in _COLUMNS]


def _unless_zero(value: float, show: Callable[[float], str]) -> str:
    return show(value) if value else ""


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(kw_only=True, slots=True)
class LiveView:
    """Shows views of a job during the run, for ``--live``.

    If the terminal cannot show a panel, two lines about the job are printed every 30 seconds.

    Attributes:
        panel_size: A function that returns the columns and rows of the terminal, or None if the
            terminal cannot show a panel.
        show_panel: A function that shows lines in a panel below all output. An empty sequence of
            lines hides the panel.
        say: A function that prints a line between the output lines of the instances.
        is_hidden: A function that returns whether the panel must be hidden, for example while an
            instance is in a debugger.
    """

    panel_size: Callable[[], tuple[int, int] | None]
    show_panel: Callable[[Sequence[str]], None]
    say: Callable[[str], None]
    has_colour: bool
    is_hidden: Callable[[], bool]
    _next_line_at: float = field(default=0.0, init=False)

    def show(self, view: JobView, now: float) -> None:
        """Show a view of the job, or hide the panel if the terminal is too small for the view."""
        size = self.panel_size()
        if size is not None:
            columns, rows = size
            most_rows = max(1, rows // 2 - _PANEL_EXTRA_ROWS)
            lines = table_lines(
                view, width=columns - 1, most_rows=most_rows, colour=self.has_colour
            )
            is_hidden = self.is_hidden() or rows <= len(lines) + 1
            self.show_panel(() if is_hidden else lines)
        elif now >= self._next_line_at:
            self._next_line_at = now + _LINE_SECONDS
            for line in headline(view):
                self.say(line)
