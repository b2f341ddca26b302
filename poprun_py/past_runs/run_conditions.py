"""The conditions of a measured run, such as its threads and the load of other programs.

The module ``doubts`` decides from these values whether the figures of the run can be trusted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poprun_py.past_runs.recorded_run import RecordedAttempt
from poprun_py.running.watch.instance_state import InstanceState, percentile
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The conditions of a run; unknown values are None or empty.

    Attributes:
        threads: The numbers of compute threads that instances had, in ascending order.
        num_cpus: The number of CPUs that the instances might use.
        cpus_of_others: The mean number of these CPUs that other programs used.
        throttled: The fraction of time for which a CPU limit stopped an instance; the largest of
            all instances.
        shares_cores: Whether other jobs held some of the cores when the job began.
        instances_per_cpu: The largest number of instances on one CPU.
        num_steps: The least number of timed steady steps of an instance.
        step_variation: The durations of half of an instance's steps differ by at most this fraction
            of their median; the largest fraction of all instances.
    """

    threads: tuple[int, ...] = ()
    num_cpus: int = 0
    cpus_of_others: float | None = None
    throttled: float | None = None
    shares_cores: bool = False
    instances_per_cpu: int = 1
    num_steps: int | None = None
    step_variation: float | None = None


def conditions_of(
    attempt: RecordedAttempt, steady: Mapping[int, Sequence[StepRecord]] | None = None
) -> Conditions:
    """Return the conditions of an attempt, whose timed steady steps are ``steady``."""
    seconds = [[step.seconds for step in own] for own in (steady or {}).values()]
    cpus_by_host = _planned_cpus(attempt)
    states = _states_in_training(attempt)
    num_cpus, cpus_of_others = _cpus_of_others(states, cpus_by_host)
    return Conditions(
        threads=_threads(attempt),
        num_cpus=num_cpus,
        cpus_of_others=cpus_of_others,
        throttled=max((_mean(state.throttled for state in own) for own in states), default=None),
        shares_cores=attempt.report.get("shares_cores") is True,
        instances_per_cpu=max(map(_most_on_a_cpu, cpus_by_host.values()), default=1),
        num_steps=min(map(len, seconds), default=None),
        step_variation=max(map(_variation, seconds), default=None),
    )


def _variation(seconds: Sequence[float]) -> float:
    """Return the distance of the quartiles of durations, as a fraction of the median."""
    low, middle, high = (percentile(seconds, part) for part in (0.25, 0.5, 0.75))
    return (high - low) / middle if middle else 0.0


def _instances(attempt: RecordedAttempt) -> list[Mapping[str, Any]]:
    instances = (attempt.plan or {}).get("instances")
    listed = instances if isinstance(instances, list) else []  # the file may be damaged
    return [each for each in listed if isinstance(each, dict)]


def _threads(attempt: RecordedAttempt) -> tuple[int, ...]:
    threads = {each.get("threads") for each in _instances(attempt)}
    return tuple(sorted(number for number in threads if isinstance(number, int)))


# --- use of CPUs by others ----------------------------------------------------------------------


def _planned_cpus(attempt: RecordedAttempt) -> dict[str, list[Sequence[int]]]:
    """Return the planned CPUs of each instance, keyed by hosts; empty CPUs are not planned."""
    found: defaultdict[str, list[Sequence[int]]] = defaultdict(list)
    for each in _instances(attempt):
        cpus = each.get("cpus")
        listed = cpus if isinstance(cpus, list) else []
        found[str(each.get("host"))].append([cpu for cpu in listed if isinstance(cpu, int)])
    return found


def _most_on_a_cpu(cpus_of_instances: Sequence[Sequence[int]]) -> int:
    on_cpu: defaultdict[int, int] = defaultdict(int)
    for cpus in cpus_of_instances:
        for cpu in cpus:
            on_cpu[cpu] += 1
    return max(on_cpu.values(), default=1)


def _cpus_of_others(
    states: Sequence[Sequence[InstanceState]], planned: Mapping[str, Sequence[Sequence[int]]]
) -> tuple[int, float | None]:
    """Return the number of the job's CPUs, and how many of them other programs used.

    If instances of a host have CPUs of their own, the use of these CPUs is summed up. If not, each
    instance reports the use of the same CPUs, so that the largest report counts.
    """
    by_host: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for own in states:
        if any(state.busy for state in own):
            busy, used = _mean(s.busy for s in own), _mean(s.cpu for s in own)
            by_host[own[-1].host].append((own[-1].num_cpus, busy, used))
    each_has_own = [all(cpus) and _most_on_a_cpu(cpus) == 1 for cpus in planned.values()]
    have_own = bool(each_has_own) and all(each_has_own)
    num_cpus, others = 0, 0.0
    for reports in by_host.values():
        if have_own:
            num_cpus += sum(count for count, _, _ in reports)
            others += sum(max(0.0, busy - used) for _, busy, used in reports)
        else:
            num_cpus += max(count for count, _, _ in reports)
            most = max(busy for _, busy, _ in reports)
            others += max(0.0, most - sum(used for _, _, used in reports))
    return num_cpus, others if by_host else None


def _states_in_training(attempt: RecordedAttempt) -> list[list[InstanceState]]:
    """Return the states of each instance during the training, or during a run without steps.

    If the training was shorter than the time between two views, the last view of the job counts.
    """
    times = [step.at for step in attempt.steps if math.isfinite(step.at)]
    begin, end = (min(times), max(times)) if times else (-math.inf, math.inf)
    views: list[JobView] = [view for at, view in attempt.observations if begin <= at <= end]
    if not views:
        last = attempt.last_view()
        views = [] if last is None else [last]
    found: defaultdict[int, list[InstanceState]] = defaultdict(list)
    for view in views:
        for state in view.instances:
            found[state.index].append(state)
    return list(found.values())


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
