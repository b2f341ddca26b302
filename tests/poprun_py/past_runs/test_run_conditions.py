"""The conditions of a run: threads, the use of its CPUs by others, limits and its steps."""

from __future__ import annotations

import pytest
from support.launcher.made_runs import MadeAttempt, made_run

from poprun_py.past_runs.measured_run import measure
from poprun_py.past_runs.recorded_run import RecordedAttempt
from poprun_py.past_runs.run_conditions import Conditions, conditions_of
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord


def plan(*cpus, threads=1):
    """Return the part of plan.json that is read, for an instance with each of the CPUs."""
    return {"instances": [{"host": "here", "cpus": each, "threads": threads} for each in cpus]}


def view(*use, num_cpus=1, throttled=0.0):
    """Return a view of instances with pairs of CPUs: in use by anyone, and by the instance."""
    states = tuple(
        InstanceState(
            index=index, host="here", busy=busy, cpu=cpu, num_cpus=num_cpus, throttled=throttled
        )
        for index, (busy, cpu) in enumerate(use)
    )
    return JobView(run_id="run", pid=1, program="x", instances=states)


def attempt(*views, planned=None, steps=(), **report):
    return RecordedAttempt(
        number=1, report=report, plan=planned, steps=tuple(steps), observations=tuple(views)
    )


def step(at, instance=0, seconds=0.1):
    return StepRecord(at=at, instance=instance, step=1, seconds=seconds, own_seconds=seconds)


def test_the_cpus_of_others_are_summed_over_instances_with_cpus_of_their_own():
    found = conditions_of(attempt((5.0, view((1.0, 0.7), (0.9, 0.9))), planned=plan([0], [1])))
    assert (found.num_cpus, found.cpus_of_others) == (2, pytest.approx(0.3))


@pytest.mark.parametrize("cpus", [[0, 1], []])
def test_instances_that_share_their_cpus_report_the_same_use(cpus):
    both = view((1.9, 0.8), (1.8, 0.7), num_cpus=2)
    found = conditions_of(attempt((5.0, both), planned=plan(cpus, cpus)))
    assert (found.num_cpus, found.cpus_of_others) == (2, pytest.approx(0.4))
    assert found.instances_per_cpu == (2 if cpus else 1)


def test_only_the_time_of_the_training_counts():
    views = [(1.0, view((1.0, 0.0))), (2.5, view((0.5, 0.4))), (9.0, view((1.0, 0.0)))]
    found = conditions_of(attempt(*views, planned=plan([0]), steps=[step(2.0), step(3.0)]))
    assert found.cpus_of_others == pytest.approx(0.1)
    short = attempt(*views, planned=plan([0]), steps=[step(2.0), step(2.1)])
    assert conditions_of(short).cpus_of_others == pytest.approx(1.0)  # the last view


def test_a_run_of_an_older_launcher_has_unknown_conditions():
    assert conditions_of(attempt((5.0, view((0.0, 0.5))))).cpus_of_others is None
    assert conditions_of(attempt()) == Conditions()


def test_limits_threads_and_shared_cores():
    views = [(1.0, view((0.0, 0.0), throttled=0.3)), (2.0, view((0.0, 0.0), throttled=0.1))]
    found = conditions_of(attempt(*views, planned=plan([0], threads=4), shares_cores=True))
    assert found.throttled == pytest.approx(0.2)
    assert (found.threads, found.shares_cores) == ((4,), True)


def test_steps_are_counted_in_the_steady_state(tmp_path):
    run = measure(made_run(tmp_path, "run", instances=2, attempts=(MadeAttempt(steps=20),)))
    assert (run.conditions.num_steps, run.conditions.step_variation) == (18, pytest.approx(0))
    steady = {0: [step(1.0, seconds=s) for s in (0.1, 0.1, 0.12, 0.14, 0.2)]}
    assert conditions_of(attempt(), steady).step_variation == pytest.approx(0.04 / 0.12)
