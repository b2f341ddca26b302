"""The numbers of one run, and the reasons for missing numbers."""

from __future__ import annotations

import json

import pytest
from support.launcher.made_runs import MadeAttempt, made_run

from poprun_py.past_runs.comparison import compare, remarks_on
from poprun_py.past_runs.measured_run import Target, measure
from poprun_py.past_runs.recorded_run import read_run, seconds_since_epoch
from poprun_py.planning.user_program import function_program
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.stragglers import Straggler


def straggler(instance, own_seconds, median_seconds):
    return Straggler(
        instance=instance, own_seconds=own_seconds, median_seconds=median_seconds, is_slow=True
    )


def test_the_steady_state_leaves_out_the_first_steps(tmp_path):
    """The first step of these runs is 50 times as long as the others."""
    found = measure(made_run(tmp_path, "run", instances=2, replicas=4))
    assert found.samples_per_second == pytest.approx(2 * 8 / 0.1)
    assert found.batch == 16
    assert found.step_seconds == found.p95_seconds == pytest.approx(0.1)
    assert (found.steps, found.seconds, found.replicas) == (20, 10.0, 4)
    assert found.program == ("/home/me/train.py",)
    assert set(found.missing) == {"loss"}


@pytest.mark.parametrize("samples", [8, 0])
def test_a_few_long_steps_make_a_run_slower(tmp_path, samples):
    """Each tenth step takes eleven times as long, which doubles the time of ten steps."""
    even, uneven = (
        measure(made_run(tmp_path, name, attempts=(attempt,)))
        for name, attempt in (
            ("even", MadeAttempt(steps=101, samples=samples)),
            ("uneven", MadeAttempt(steps=101, samples=samples, every_tenth=11)),
        )
    )
    assert even.step_seconds == uneven.step_seconds == pytest.approx(0.1)
    # The first ten of the 101 steps are left out, so that 9 of 91 steps are long.
    assert compare([even, uneven]).groups[1].speedup == pytest.approx(91 / (91 + 9 * 10))


def test_a_function_call_is_named_without_its_folder(tmp_path):
    calls = [
        measure(made_run(tmp_path, name, program=function_program(tmp_path / name, "train")))
        for name in ("one", "two")
    ]
    assert [run.program for run in calls] == [("train()",)] * 2
    assert remarks_on(calls) == ()


def test_the_speed_is_measured_in_the_attempt_with_most_steps(tmp_path):
    short, long = MadeAttempt(steps=3, step_seconds=1.0), MadeAttempt(steps=30, samples=4)
    found = measure(made_run(tmp_path, "run", attempts=(long, short)))
    assert found.samples_per_second == pytest.approx(40)
    assert found.attempts == 2


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (0, "the program does not count steps"),
        (1, "the run made too few steps to measure their time"),
    ],
)
def test_too_few_steps_have_no_speed(tmp_path, steps, why):
    found = measure(made_run(tmp_path, "run", attempts=(MadeAttempt(steps=steps),)))
    assert found.samples_per_second is None
    assert found.step_seconds is None
    assert found.missing["step_seconds"] == found.missing["samples_per_second"] == why


def test_steps_without_samples_have_a_time(tmp_path):
    found = measure(made_run(tmp_path, "run", attempts=(MadeAttempt(samples=0),)))
    assert found.step_seconds == pytest.approx(0.1)
    assert found.samples_per_second is None
    assert found.missing["samples_per_second"] == (
        "the program does not report the number of samples in a step"
    )


def test_the_slowest_instance_is_found(tmp_path):
    slow = MadeAttempt(own_seconds={0: 0.04, 2: 0.05})
    found = measure(made_run(tmp_path, "slow", instances=3, attempts=(slow,)))
    assert found.slowest == straggler(1, 0.1, 0.05)
    quick = MadeAttempt(step_seconds=1e-3, own_seconds={0: 6e-4})
    assert measure(made_run(tmp_path, "quick", instances=2, attempts=(quick,))).slowest is None
    assert measure(made_run(tmp_path, "even", instances=2)).slowest is None


def test_a_running_run_has_no_duration(tmp_path):
    found = measure(made_run(tmp_path, "run", seconds=None))
    assert (found.seconds, found.exit_code) == (None, None)
    assert found.missing["seconds"] == "the run has not ended"


def test_without_recorded_steps_the_speed_is_that_of_the_last_observation(tmp_path):
    run = made_run(tmp_path, "run", attempts=(MadeAttempt(steps=0),))
    states = [
        InstanceState(
            index=index, num_steps=9, samples_per_second=50.0, step_seconds=0.02, num_samples=80,
            p95_seconds=0.03, loss=0.5 + index,
        )
        for index in (0, 1)
    ]  # fmt: skip
    view = JobView(run_id="run", pid=1, program="x", seconds=1, instances=tuple(states))
    report = {**run.report}
    report["attempts"][0]["observation"] = view.to_json()
    run.files.report.write_text(json.dumps(report))
    found = measure(read_run(run.files))
    assert (found.samples_per_second, found.batch, found.loss) == (100.0, 16.0, 1.0)
    assert (found.step_seconds, found.p95_seconds) == (0.02, 0.03)


def test_the_time_to_a_target_is_measured_from_the_start_of_the_run(tmp_path):
    attempt = MadeAttempt(delay=3.0, values={10: {"accuracy": 0.95}})
    run = made_run(tmp_path, "run", attempts=(attempt,))
    assert measure(run, Target("accuracy", 0.9)).reached == pytest.approx(4.0)
    assert (
        measure(run, Target("accuracy", 0.99)).missing["reached"] == "the target was never reached"
    )
    assert (
        measure(run, Target("f1", 0.9)).missing["reached"]
        == "no value with the name of the target was logged"
    )
    assert "reached" not in measure(run).missing


@pytest.mark.parametrize("text", [None, "", "yesterday", 17])
def test_texts_that_are_not_a_time_give_none(text):
    assert seconds_since_epoch(text) is None
