"""Parsing of targets, and the time when a run reaches one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.made_runs import BEGAN, MadeAttempt, made_run

from poprun_py.errors import UsageError
from poprun_py.past_runs.measured_run import Target, losses, parse_target, reached_at


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy=0.9", Target("accuracy", 0.9)),
        ("accuracy>=0.9", Target("accuracy", 0.9)),
        ("loss=0.3", Target("loss", 0.3, at_most=True)),
        ("eval/Loss = 3e-1", Target("eval/Loss", 0.3, at_most=True)),
        ("word_error_rate=5", Target("word_error_rate", 5, at_most=True)),
        ("loss>=2", Target("loss", 2)),
        ("latency<=20", Target("latency", 20, at_most=True)),
    ],
)
def test_forms_of_a_target(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "accuracy", "=3", "accuracy=", "accuracy=high", "loss=nan", "loss<0.3", "a==1"]
)
def test_texts_that_are_not_a_target_are_refused(text):
    with pytest.raises(UsageError, match="expected a name and a number"):
        parse_target(text)


@given(st.text("abc/_. ", min_size=1).map(str.strip).filter(bool), st.booleans(), st.integers())
def test_the_text_of_a_target_is_parsed_to_the_same_target(name, at_most, bound):
    target = Target(name, bound % 100_000, at_most)
    assert parse_target(str(target)) == target


def test_nan_does_not_reach_a_target():
    for target in (Target("loss", 1, at_most=True), Target("loss", 1)):
        assert not target.is_reached_by(float("nan"))


def test_a_target_is_reached_once_in_all_attempts(tmp_path):
    first = MadeAttempt(values={5: {"accuracy": 0.5}, 10: {"accuracy": 0.7}})
    second = MadeAttempt(
        delay=4.0, first_step=11, values={15: {"accuracy": 0.9}, 20: {"accuracy": 0.95}}
    )
    run = made_run(tmp_path, "run", attempts=(first, second))
    assert reached_at(run, Target("accuracy", 0.6)) == (BEGAN + 2.0, True)
    assert reached_at(run, Target("accuracy", 0.9)) == (BEGAN + 5.5, True)
    assert reached_at(run, Target("accuracy", 0.99)) == (None, True)
    assert reached_at(run, Target("f1", 0.1)) == (None, False)


def test_the_loss_of_a_step_is_the_mean_over_instances(tmp_path):
    falling = [1 / step for step in range(1, 21)]
    run = made_run(tmp_path, "run", instances=2, attempts=(MadeAttempt(losses=falling),))
    found = losses(run.attempts[0])
    assert [(step, loss) for _, step, loss in found] == list(enumerate(falling, 1))
    at, is_measured = reached_at(run, Target("loss", 0.1, at_most=True))
    assert (at, is_measured) == (pytest.approx(BEGAN + 2.0), True)


def test_the_last_loss_may_be_nan(tmp_path):
    diverging = [1.0] * 19 + [float("nan")]
    run = made_run(tmp_path, "run", attempts=(MadeAttempt(losses=diverging),))
    assert math.isnan(losses(run.attempts[0])[-1][2])
    assert reached_at(run, Target("loss", 0.5, at_most=True)) == (None, True)


def test_a_logged_loss_is_preferred_to_the_loss_of_steps(tmp_path):
    attempt = MadeAttempt(losses=[0.01] * 20, values={10: {"loss": 0.5}, 20: {"loss": 0.2}})
    run = made_run(tmp_path, "run", attempts=(attempt,))
    at, _ = reached_at(run, Target("loss", 0.2, at_most=True))
    assert at == pytest.approx(BEGAN + 3.0)
