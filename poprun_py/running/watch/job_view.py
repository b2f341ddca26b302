"""The whole job as the views show it: a table of the instances, and five lines at the end.

Pure: states in, text out. rich is imported on use. Nothing here decides when to show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poprun_py.on_use import Shown
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.stragglers import Straggler, stands_out
from poprun_py.texts import rich_lines

_COMPUTING = ("computing", "transferring", "updating")
_STATUS_VERSION = 1
COLUMNS = (
    "instance", "host", "phase", "step", "samples/s", "step ms", "p95",
    "compute", "load", "reduce", "wait", "other", "CPU", "memory",
)  # fmt: skip
# Of a narrow terminal; who waits and who does not is seen longest.
_MISSED_FIRST = (
    "p95", "other", "CPU", "host", "memory", "samples/s", "reduce", "load", "compute", "step",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobView(Shown):
    """A job at one time: its run, launcher and age, its instances, and the slowest of them."""

    run_id: str
    pid: int
    program: str
    seconds: float
    instances: tuple[InstanceState, ...]
    worst: Straggler | None = None

    def __repr__(self) -> str:
        return (
            f"JobView(run_id={self.run_id!r}, pid={self.pid}, program={self.program!r}, "
            f"seconds={self.seconds:.1f}, instances={len(self.instances)})"
        )

    @property
    def step(self) -> int | None:
        """The training step of the instance that is furthest; None if nobody counts any."""
        return max((s.step for s in self.instances if s.step is not None), default=None)

    @property
    def samples_per_second(self) -> float:
        """Of all instances together."""
        return sum(state.samples_per_second for state in self.instances)

    def to_json(self) -> dict[str, Any]:
        """Return the view for programs."""
        return {**self._head(), "instances": [state.to_json() for state in self.instances]}

    def json_text(self) -> str:
        """Return ``to_json`` as text, joined from the texts that the instance states keep."""
        instances = ", ".join([state.json_text() for state in self.instances])
        return f'{json.dumps(self._head())[:-1]}, "instances": [{instances}]}}'

    def _head(self) -> dict[str, Any]:
        """Return the values of ``to_json`` that are about the job as a whole."""
        worst = self.worst
        return {
            "version": _STATUS_VERSION,
            "run_id": self.run_id,
            "pid": self.pid,
            "program": self.program,
            "seconds": round(self.seconds, 3),
            "samples_per_second": round(self.samples_per_second, 3),
            "slowest": None
            if worst is None
            else {
                "instance": worst.instance,
                "host": worst.host,
                "step_seconds_without_waiting": round(worst.own_seconds, 9),
                "median_of_all": round(worst.median_seconds, 9),
                "is_straggler": worst.is_slow,
                "cause": worst.cause,
                "detail": worst.detail,
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobView:
        """Read what ``to_json`` wrote."""
        worst = data["slowest"]
        return cls(
            run_id=data["run_id"],
            pid=data["pid"],
            program=data["program"],
            seconds=data["seconds"],
            instances=tuple(InstanceState.from_json(each) for each in data["instances"]),
            worst=None
            if worst is None
            else Straggler(
                instance=worst["instance"],
                host=worst["host"],
                own_seconds=worst["step_seconds_without_waiting"],
                median_seconds=worst["median_of_all"],
                is_slow=worst["is_straggler"],
                cause=worst["cause"],
                detail=worst["detail"],
            ),
        )


def headline(view: JobView) -> list[str]:
    """Return which job it is and how fast, and the slowest instance with the reason."""
    rate = f", {_rate(view.samples_per_second)} samples/s" if view.samples_per_second else ""
    first = (
        f"{view.program}: run {view.run_id}, launcher {view.pid}, "
        f"{_duration(view.seconds)}, {_count(len(view.instances), 'instance')}{rate}"
    )
    return [first, *([_slowest(view.worst)] if view.worst is not None else [])]


def table_lines(
    view: JobView, *, width: int, most_rows: int | None = None, colour: bool = False
) -> list[str]:
    """Return the headline and the table, one row for each instance.

    Args:
        view: what to show.
        width: of the lines, in columns; columns of the table that do not fit are left out.
        most_rows: with more instances than this, those with the longest steps are shown: one
            at least.
        colour: whether phases and the slowest instance have colours.
    """
    from rich import box
    from rich.table import Table

    states: Sequence[InstanceState] = view.instances
    if most_rows is not None and len(states) > most_rows:
        by_need = sorted(states, key=lambda state: -state.own_seconds)[: max(most_rows - 1, 1)]
        states = sorted(by_need, key=lambda state: state.index)
    rows = [dict(zip(COLUMNS, row_of(state), strict=True)) for state in states]
    columns = _columns_within(width, rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        is_text = name in ("host", "phase")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    worst = view.worst.instance if view.worst is not None and view.worst.is_slow else None
    for state, row in zip(states, rows, strict=True):
        style = "yellow" if state.index == worst else None
        table.add_row(*(row[name] for name in columns), style=style)
    left = len(view.instances) - len(states)
    why = " whose steps are shorter" if any(state.own_seconds for state in states) else ""
    more = [f"and {_count(left, 'more instance')}{why}"] if left else []
    return rich_lines(*headline(view), table, *more, width=width, colour=colour)


def _columns_within(width: int, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the columns that fit, without those that can be missed first."""
    wide = {name: max(len(name), *(len(row[name]) for row in rows), 0) + 2 for name in COLUMNS}
    left = list(COLUMNS)
    for name in _MISSED_FIRST:
        if sum(wide[each] for each in left) - 2 <= width:
            break
        left.remove(name)
    return left


def summary_lines(view: JobView) -> list[str]:
    """Return the five lines for the end of a job; none if it made no steps that have a time."""
    timed = [state for state in view.instances if state.num_steps]
    if not timed:
        return []
    longest = max(timed, key=lambda state: state.step_seconds)
    parts = {name: sum(s.share(*names) for s in timed) / len(timed) for name, names in _PARTS}
    shares = ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= 0.005)
    rate = view.samples_per_second
    steps = sum(1 / s.step_seconds for s in timed if s.step_seconds) / len(timed)
    speed = f"{_rate(rate)} samples/s in total" if rate else f"{_rate(steps)} steps/s"
    peak = max(timed, key=lambda state: state.memory_bytes)
    return [
        f"speed: {speed}, {_count(len(view.instances), 'instance')}, {_duration(view.seconds)}",
        f"step: {_ms(longest.step_seconds)} ms (median), {_ms(longest.p95_seconds)} ms (95th "
        "percentile)",
        f"time: {shares}",
        _slowest(view.worst) if view.worst is not None else "slowest: there is one instance only",
        f"use: {sum(s.cpu for s in timed):.1f} CPUs in total, at most "
        f"{_bytes(peak.memory_bytes)} of memory (instance {peak.index})",
    ]


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


def _slowest(worst: Straggler) -> str:
    """Return who is slowest and why, or that nobody stands out."""
    if not stands_out(worst.own_seconds, worst.median_seconds):
        return "slowest: no instance stands out"
    reason = f": {worst.reason}" if worst.reason else ""
    return (
        f"slowest: instance {worst.instance} on {worst.host or 'its host'}, "
        f"{_ms(worst.own_seconds)} ms a step without waiting, the median is "
        f"{_ms(worst.median_seconds)} ms{reason}"
    )


def row_of(state: InstanceState) -> list[str]:
    """Return the cells of an instance, in the order of ``COLUMNS``."""
    has_steps = state.num_steps > 0
    other = 1.0 - state.share(*_COMPUTING, "loading", "reducing", "waiting")
    shares = (
        state.share(*_COMPUTING),
        state.share("loading"),
        state.share("reducing"),
        state.share("waiting"),
        max(0.0, other),
    )
    is_known = any(state.shares)
    return [
        str(state.index),
        state.host,
        state.phase,
        "" if state.step is None else str(state.step),
        _rate(state.samples_per_second) if state.samples_per_second else "",
        _ms(state.step_seconds) if has_steps else "",
        _ms(state.p95_seconds) if has_steps else "",
        *(f"{share:.0%}" if is_known else "" for share in shares),
        f"{state.cpu:.1f}" if state.memory_bytes else "",
        _bytes(state.memory_bytes) if state.memory_bytes else "",
    ]


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
