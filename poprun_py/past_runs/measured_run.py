"""Measurement of one run's speed, loss and duration, with a reason for each value that is unknown.

A run's speed is measured in its attempt with the most recorded steps. The first tenth of each
instance's steps is ignored, because compiling and filling caches slow these steps down. If no steps
were recorded, the speed is taken from the last periodic observation of the job.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Final

from poprun_py.errors import UsageError
from poprun_py.past_runs.recorded_run import (
    RecordedAttempt,
    RecordedRun,
    refusing_damage,
    seconds_since_epoch,
)
from poprun_py.past_runs.run_conditions import Conditions, conditions_of
from poprun_py.planning.user_program import call_folder, short_name
from poprun_py.running.watch.instance_state import median, percentile
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import Straggler, slowest_by_medians

_P95: Final = 0.95
_LEFT_OUT: Final = 0.1
_NO_STEPS: Final = "the program does not count steps"
_FEW_STEPS: Final = "the run made too few steps to measure their time"
_NO_SAMPLES: Final = "the program does not report the number of samples in a step"
LOSS: Final = "loss"
_SPELLING: Final = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|=)\s*([^<>=\s]+)\s*")
# If the name of a logged value contains one of these words, smaller values are better.
_SHRINKS: Final = ("loss", "error", "perplexity")


_UNKNOWN_CONDITIONS: Final = Conditions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measured values of one run; unknown values are None.

    Attributes:
        program: The program and its arguments, without the Python interpreter.
        hosts: The names of the hosts on which the last attempt ran.
        versions: The versions of installed software, keyed by its name.
        samples_per_second: The sum of the speeds of all instances. The speed of an instance is
            the number of samples of its steps, divided by the total duration of its steps.
        batch: The global batch, which is the number of samples of all instances in one step.
        step_seconds: The median duration of the steps of all instances.
        mean_step_seconds: The mean duration of the steps of all instances; their median if only an
            observation of the job is known.
        slowest: The slowest instance; None if no instance is much slower than the others.
        seconds: The duration of the whole run, including all its attempts.
        steps: The number of the last training step.
        loss: The loss of the last training step, averaged over the instances.
        reached: The seconds from the start of the run until the run reached the training target.
        exit_code: The exit code of the run; None while the run has not ended.
        resumed_step: The training step of the checkpoint from which the first attempt continued; 0
            without a checkpoint.
        conditions: The conditions under which the speed was measured.
        missing: The reason for each unknown value, keyed by the name of its field.
    """

    name: str
    program: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    instances: int = 1
    replicas: int = 1
    samples_per_second: float | None = None
    batch: float | None = None
    step_seconds: float | None = None
    mean_step_seconds: float | None = None
    p95_seconds: float | None = None
    slowest: Straggler | None = None
    seconds: float | None = None
    steps: int | None = None
    loss: float | None = None
    reached: float | None = None
    exit_code: int | None = 0
    attempts: int = 1
    resumed_step: int = 0
    conditions: Conditions = _UNKNOWN_CONDITIONS
    missing: Mapping[str, str] = field(default_factory=dict)


def measure(run: RecordedRun, target: Target | None = None) -> Measured:
    """Return the measured values of a run, including the time that it took to reach ``target``.

    Raises:
        UsageError: The report of the run has missing or impossible values.
    """
    with refusing_damage(run.files):
        return _measured(run, target)


def _measured(run: RecordedRun, target: Target | None) -> Measured:
    report, plan = run.report, run.report["plan"]
    first = run.attempts[0].report if run.attempts else {}
    last = run.attempts[-1].report if run.attempts else {}
    reached, is_logged = reached_at(run, target) if target else (None, False)
    made = Measured(
        name=run.run_id,
        program=_program(report),
        hosts=tuple(map(str, last.get("hosts") or ())),
        versions=dict(report.get("versions") or {}),
        instances=int(plan["num_instances"]),
        replicas=int(plan.get("num_replicas", plan["num_instances"])),
        seconds=_since(run.began_at, seconds_since_epoch(report.get("ended_at"))),
        steps=_last_step(run),
        loss=_last_loss(run),
        reached=_since(run.began_at, reached),
        exit_code=report.get("exit_code") if report.get("state", "ended") == "ended" else None,
        attempts=max(1, len(run.attempts)),
        resumed_step=int(first.get("resumed_step") or 0),
        conditions=conditions_of(run.attempts[-1]) if run.attempts else _UNKNOWN_CONDITIONS,
    )
    made = _with_steady_speed(made, run) or _with_observed_speed(made, run) or made
    return replace(made, missing=_missing(made, target, is_logged))


def _since(began: float | None, at: float | None) -> float | None:
    return None if began is None or at is None else at - began


def _missing(made: Measured, target: Target | None, is_logged: bool) -> dict[str, str]:
    no_time = _FEW_STEPS if made.steps else _NO_STEPS
    no_samples = no_time if made.step_seconds is None else _NO_SAMPLES
    reasons = {
        "samples_per_second": no_samples,
        "batch": no_samples,
        "step_seconds": no_time,
        "p95_seconds": no_time,
        "seconds": "the run has not ended",
        "steps": _NO_STEPS,
        "loss": "neither a step nor a logged value has a loss",
    }
    if target is not None:
        reasons["reached"] = (
            "the target was never reached"
            if is_logged
            else "no value with the name of the target was logged"
        )
    return {name: why for name, why in reasons.items() if getattr(made, name) is None}


# --- speed of a run -----------------------------------------------------------------------------


def _with_steady_speed(made: Measured, run: RecordedRun) -> Measured | None:
    """Return ``made`` with the speed of the recorded steps; None if too few steps were recorded."""
    attempt = max(run.attempts, key=lambda each: (len(each.steps), each.number), default=None)
    by_instance = _steady_steps(attempt) if attempt is not None else {}
    if attempt is None or not by_instance:
        return None
    seconds = [each.seconds for steps in by_instance.values() for each in steps]
    rates = [
        sum(s.samples for s in steps) / sum(s.seconds for s in steps)
        for steps in by_instance.values()
    ]
    batch = sum(median([s.samples for s in steps]) for steps in by_instance.values())
    worst = slowest_by_medians(
        {
            index: (median([s.own_seconds for s in steps]), median([s.seconds for s in steps]))
            for index, steps in by_instance.items()
        }
    )
    return replace(
        made,
        samples_per_second=sum(rates) if batch else None,
        batch=batch or None,
        step_seconds=median(seconds),
        mean_step_seconds=sum(seconds) / len(seconds),
        p95_seconds=percentile(seconds, _P95),
        slowest=worst if worst.is_slow else None,
        conditions=conditions_of(attempt, by_instance),
    )


def _steady_steps(attempt: RecordedAttempt) -> dict[int, list[StepRecord]]:
    """Return the timed steps of each instance, without the slower steps at the beginning."""
    steady = {
        instance: [each for each in own[max(1, int(len(own) * _LEFT_OUT)) :] if each.is_timed]
        for instance, own in attempt.steps_by_instance().items()
    }
    return {instance: own for instance, own in steady.items() if own}


def _with_observed_speed(made: Measured, run: RecordedRun) -> Measured | None:
    """Return ``made`` with the speed in the last job view with timed steps; None without one."""
    for attempt in reversed(run.attempts):
        view = attempt.last_view()
        timed = [each for each in view.instances if each.num_steps] if view else []
        if timed:
            batch = sum(each.num_samples / (each.num_steps + 1) for each in timed)
            known = [each.loss for each in timed if each.loss is not None]
            observed_loss = sum(known) / len(known) if known else None
            return replace(
                made,
                samples_per_second=sum(each.samples_per_second for each in timed) or None,
                batch=batch or None,
                step_seconds=max(each.step_seconds for each in timed),
                mean_step_seconds=max(each.step_seconds for each in timed),
                p95_seconds=max(each.p95_seconds for each in timed),
                loss=observed_loss if made.loss is None else made.loss,
                conditions=replace(
                    conditions_of(attempt), num_steps=min(each.num_steps for each in timed)
                ),
            )
    return None


# --- loss, last step and program of a run -------------------------------------------------------


def _last_loss(run: RecordedRun) -> float | None:
    for attempt in reversed(run.attempts):
        if found := losses(attempt):
            return found[-1][2]
    return None


def _last_step(run: RecordedRun) -> int | None:
    for attempt in reversed(run.attempts):
        reported = [each.get("training_step") for each in attempt.report.get("instances") or ()]
        known = [step for step in reported if isinstance(step, int) and step]
        if found := [*known, *(each.step for each in attempt.steps)]:
            return max(found)
    return None


def _program(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the path of the user's script and its arguments, without the Python interpreter.

    If the run launched a Python function, return only the name of the function, because the folder
    in its command differs between runs.
    """
    words = [str(word) for word in report.get("program") or ()]
    if call_folder(tuple(words)) is not None:
        return (short_name(tuple(words)),)
    if len(words) > 1 and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
    if words and not words[0].startswith("-"):
        words[0] = str(PurePath(str(report.get("folder") or ""), words[0]))
    return tuple(words)


# --- training targets and losses ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A training target: the logged value ``name`` must be at most or at least ``bound``."""

    name: str
    bound: float
    at_most: bool = False

    def is_reached_by(self, value: float) -> bool:
        """Return whether ``value`` reaches this training target; NaN reaches no target."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.at_most else '>='}{self.bound:g}"


def parse_target(text: str) -> Target:
    """Parse a training target: ``NAME>=NUMBER``, ``NAME<=NUMBER`` or ``NAME=NUMBER``.

    ``NAME=NUMBER`` needs no quotes in a shell. ``NAME=NUMBER`` means ``NAME<=NUMBER`` if the name
    contains loss, error or perplexity, and ``NAME>=NUMBER`` for all other names.

    Raises:
        UsageError: ``text`` is not a training target.
    """
    match = _SPELLING.fullmatch(text)
    try:
        bound = float(match[3]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        raise UsageError(
            f"--target {text!r}: expected a name and a number, such as accuracy=0.9, loss=0.3, or "
            "in quotes 'loss<=0.3'"
        )
    name = match[1]
    shrinks = any(word in name.lower() for word in _SHRINKS)
    return Target(name, bound, at_most=match[2] == "<=" or (match[2] == "=" and shrinks))


def losses(attempt: RecordedAttempt) -> list[tuple[float, int, float]]:
    """Return the time, the step number and the loss (mean over instances) of each training step.

    The time of a step is the time when the last instance completed it, in seconds since the epoch.
    If the recorded steps have no losses, the values that the program logged as ``loss`` are used.
    """
    by_step: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in attempt.steps:
        if each.loss is not None:
            by_step[each.step].append((each.at, each.loss))
    found = [
        (max(at for at, _ in records), step, sum(loss for _, loss in records) / len(records))
        for step, records in by_step.items()
    ]
    return sorted(found or logged(attempt, LOSS))


def reached_at(run: RecordedRun, target: Target) -> tuple[float | None, bool]:
    """Return the time when a run first reached a target, and whether the target's value is known.

    The time, in seconds since the epoch, is None if the run did not reach the target. If the
    target is ``loss`` and the program did not log it, the losses of the recorded steps are used.
    """
    found: list[tuple[float, int, float]] = []
    for attempt in run.attempts:
        values = logged(attempt, target.name)
        found += values or (losses(attempt) if target.name == LOSS else [])
    times = (at for at, _, value in found if target.is_reached_by(value))
    return min(times, default=None), bool(found)


def logged(attempt: RecordedAttempt, name: str) -> list[tuple[float, int, float]]:
    """Return (time, training step, value) of each value that the program logged as ``name``."""
    return [
        (each.at, each.step, each.values[name]) for each in attempt.values if name in each.values
    ]
