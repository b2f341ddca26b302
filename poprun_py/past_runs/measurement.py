"""The numbers of one run that can be compared with those of another, and why one is missing.

The speed is that of the steady state: of the attempt that recorded the most steps (the later one of
equals) each instance's first step and first tenth of steps are left out, in which programs are
compiled and caches filled. A run that recorded no steps has the speed of its last look, over the
steps just before it.

Pure: a recorded run in, values out. Nothing here compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Final

from poprun_py.past_runs.recorded_run import (
    NOT_A_RUN,
    RecordedAttempt,
    RecordedRun,
    moment_of,
    no_report,
)
from poprun_py.past_runs.targets import Target, losses, reached_at
from poprun_py.planning.user_program import call_folder, short_name
from poprun_py.running.watch.instance_state import median, percentile
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import waited_for

_P95: Final = 0.95
_LEFT_OUT: Final = 0.1
_NO_STEPS: Final = "the program counts no steps"
_FEW_STEPS: Final = "it made too few steps to time one"
_NO_SAMPLES: Final = "the program does not say how many samples a step has"


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest instance, where it stands out: seconds of its step and of the median one's.

    Both are medians over the steady state, without waiting for others.
    """

    instance: int
    own_seconds: float
    median_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The numbers of one run; None where there is none, and ``missing`` says why, by field.

    Attributes:
        name: of the run.
        program: with its arguments, without the interpreter; the script with its folder.
        hosts: names of the last attempt's hosts.
        versions: by package.
        instances: how many.
        replicas: over all instances.
        samples_per_second: the sum over instances of the median over the steady state.
        batch: the global batch: samples per step of all instances together.
        step_seconds: the median of the steady steps of all instances.
        p95_seconds: their 95th percentile.
        slowest: the slowest instance; None where none stands out.
        seconds: from the beginning of the run to its end, over all attempts.
        steps: the number of the last training step.
        loss: the mean of the instances' losses of the last step.
        reached: the seconds from the beginning of the run until the target was reached first.
        exit_code: None while it runs.
        attempts: how many.
        resumed_step: of the checkpoint that the first attempt began with; 0 without one.
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
    p95_seconds: float | None = None
    slowest: Slowest | None = None
    seconds: float | None = None
    steps: int | None = None
    loss: float | None = None
    reached: float | None = None
    exit_code: int | None = 0
    attempts: int = 1
    resumed_step: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Speed:
    samples_per_second: float | None = None
    batch: float | None = None
    step_seconds: float | None = None
    p95_seconds: float | None = None
    slowest: Slowest | None = None
    loss: float | None = None


def measure(run: RecordedRun, target: Target | None = None) -> Measured:
    """Return the numbers of a run.

    Args:
        run: what its files tell.
        target: the time until it was reached is measured.

    Raises:
        UsageError: its report is none.
    """
    try:
        return _measured(run, target)
    except NOT_A_RUN as error:
        raise no_report(run.files, error) from None


def _measured(run: RecordedRun, target: Target | None) -> Measured:
    report, plan = run.report, run.report["plan"]
    first = run.attempts[0].report if run.attempts else {}
    last = run.attempts[-1].report if run.attempts else {}
    speed = _steady_speed(run) or _viewed_speed(run) or _Speed()
    loss = _last_loss(run)
    began, ended = began_at(run), moment_of(report.get("ended_at"))
    reached, is_logged = reached_at(run, target) if target else (None, False)
    made = Measured(
        name=run.run_id,
        program=_program(report),
        hosts=tuple(map(str, last.get("hosts") or ())),
        versions=dict(report.get("versions") or {}),
        instances=int(plan["num_instances"]),
        replicas=int(plan.get("num_replicas", plan["num_instances"])),
        samples_per_second=speed.samples_per_second,
        batch=speed.batch,
        step_seconds=speed.step_seconds,
        p95_seconds=speed.p95_seconds,
        slowest=speed.slowest,
        seconds=_since(began, ended),
        steps=_last_step(run),
        loss=speed.loss if loss is None else loss,
        reached=_since(began, reached),
        exit_code=report.get("exit_code") if report.get("state", "ended") == "ended" else None,
        attempts=max(1, len(run.attempts)),
        resumed_step=int(first.get("resumed_step") or 0),
    )
    return replace(made, missing=_missing(made, target, is_logged))


def _since(began: float | None, at: float | None) -> float | None:
    return None if began is None or at is None else at - began


def _missing(made: Measured, target: Target | None, is_logged: bool) -> dict[str, str]:
    """Return why numbers are missing, by field; ``is_logged`` tells of the target's name."""
    no_time = _FEW_STEPS if made.steps else _NO_STEPS
    no_samples = no_time if made.step_seconds is None else _NO_SAMPLES
    reasons = {
        "samples_per_second": no_samples,
        "batch": no_samples,
        "step_seconds": no_time,
        "p95_seconds": no_time,
        "seconds": "it has not ended",
        "steps": _NO_STEPS,
        "loss": "no step and no logged value tells it",
    }
    if target is not None:
        reasons["reached"] = "never reached" if is_logged else "nothing of that name was logged"
    return {name: why for name, why in reasons.items() if getattr(made, name) is None}


def began_at(run: RecordedRun) -> float | None:
    """Return when a run began, in seconds since the epoch; None if its report does not tell."""
    return moment_of(run.report.get("began_at"))


# --- speed --------------------------------------------------------------------------------------


def _steady_speed(run: RecordedRun) -> _Speed | None:
    """Return the speed by the recorded steps; None if there are too few."""
    attempt = max(run.attempts, key=lambda each: (len(each.steps), each.number), default=None)
    by_instance = _steady_steps(attempt.steps) if attempt is not None else {}
    if not by_instance:
        return None
    seconds = [each.seconds for steps in by_instance.values() for each in steps]
    rates = [median([s.samples / s.seconds for s in steps]) for steps in by_instance.values()]
    batch = sum(median([s.samples for s in steps]) for steps in by_instance.values())
    return _Speed(
        samples_per_second=sum(rates) if batch else None,
        batch=batch or None,
        step_seconds=median(seconds),
        p95_seconds=percentile(seconds, _P95),
        slowest=_slowest(by_instance),
    )


def _slowest(by_instance: Mapping[int, Sequence[StepRecord]]) -> Slowest | None:
    own = {i: median([each.own_seconds for each in steps]) for i, steps in by_instance.items()}
    whole = {i: median([each.seconds for each in steps]) for i, steps in by_instance.items()}
    worst = max(own, key=lambda instance: own[instance])
    is_slow = worst in waited_for({i: (own[i], whole[i]) for i in own})
    return Slowest(worst, own[worst], median(list(own.values()))) if is_slow else None


def _steady_steps(steps: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    """Return the steps of each instance in the steady state; instances with none are left out."""
    by_instance: defaultdict[int, list[StepRecord]] = defaultdict(list)
    for each in steps:
        by_instance[each.instance].append(each)
    steady = {
        instance: [each for each in own[max(1, int(len(own) * _LEFT_OUT)) :] if each.seconds > 0]
        for instance, own in by_instance.items()
    }
    return {instance: own for instance, own in steady.items() if own}


def _viewed_speed(run: RecordedRun) -> _Speed | None:
    """Return the speed by the last look at the instances; None if none had made a timed step."""
    for attempt in reversed(run.attempts):
        view = _last_view(attempt)
        timed = [each for each in view.instances if each.num_steps] if view else []
        if timed:
            batch = sum(each.num_samples / (each.num_steps + 1) for each in timed)
            known = [each.loss for each in timed if each.loss is not None]
            return _Speed(
                samples_per_second=sum(each.samples_per_second for each in timed) or None,
                batch=batch or None,
                step_seconds=max(each.step_seconds for each in timed),
                p95_seconds=max(each.p95_seconds for each in timed),
                loss=sum(known) / len(known) if known else None,
            )
    return None


def _last_view(attempt: RecordedAttempt) -> JobView | None:
    observation = attempt.report.get("observation")
    if isinstance(observation, dict):
        try:
            return JobView.from_json(observation)
        except NOT_A_RUN:
            pass  # of another version of the launcher
    return attempt.looks[-1][1] if attempt.looks else None


# --- the rest -----------------------------------------------------------------------------------


def _last_loss(run: RecordedRun) -> float | None:
    for attempt in reversed(run.attempts):
        if found := losses(attempt):
            return found[-1][2]
    return None


def _last_step(run: RecordedRun) -> int | None:
    """Return the number of the last training step that any instance ended."""
    for attempt in reversed(run.attempts):
        told = [each.get("training_step") for each in attempt.report.get("instances") or ()]
        known = [step for step in told if isinstance(step, int) and step]
        if found := [*known, *(each.step for each in attempt.steps)]:
            return max(found)
    return None


def _program(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return program and arguments without the interpreter, the script with its folder.

    Of a function its name alone: the folder of its call is a new one every time.
    """
    words = [str(word) for word in report.get("program") or ()]
    if call_folder(tuple(words)) is not None:
        return (short_name(tuple(words)),)
    if len(words) > 1 and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
    if words and not words[0].startswith("-"):
        words[0] = str(PurePath(str(report.get("folder") or ""), words[0]))
    return tuple(words)
