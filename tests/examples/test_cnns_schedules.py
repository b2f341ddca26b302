"""The learning rates of the CNN programs: what holds for all schedules, and known points."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples import cnn_programs as cnns

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]
KINDS = ("stepped", "cosine", "exponential", "polynomial_decay_lr")


@pytest.fixture(scope="module")
def schedules():
    with cnns.imported():
        yield cnns.module("lr_schedules")


def options(**words):
    """Return the defaults of the programs, and what is given."""
    return SimpleNamespace(**{
        "lr_schedule": "stepped", "base_learning_rate_exponent": -7.0, "warmup_epochs": 5.0,
        "learning_rate_decay": [0.1], "learning_rate_schedule": [0.5, 0.75],
        "lr_decay_rate": 0.94, "lr_decay_epochs": 1.0, "poly_power": 2.0, "poly_end_ratio": 0.0,
    } | words)  # fmt: skip


def made(schedules, epochs=100.0, global_batch=256, **words):
    return schedules.make(options(**words), epochs=epochs, global_batch=global_batch)


numbers = st.floats(0.0, 1.0)
every_schedule = st.fixed_dictionaries({
    "lr_schedule": st.sampled_from(KINDS),
    "base_learning_rate_exponent": st.integers(-12, 2),
    "warmup_epochs": st.floats(0.0, 20.0),
    "learning_rate_decay": st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    "learning_rate_schedule": st.lists(numbers, min_size=3, max_size=3),
    "lr_decay_rate": st.floats(0.1, 1.0),
    "lr_decay_epochs": st.floats(0.1, 10.0),
    "poly_power": st.floats(0.1, 4.0),
    "poly_end_ratio": numbers,
})  # fmt: skip


@given(every_schedule, st.floats(0.01, 100.0), numbers, numbers)
def test_rates_rise_in_a_straight_line_and_then_only_fall(schedules, words, epochs, one, other):
    schedule = made(schedules, epochs, **words)
    warmup = min(words["warmup_epochs"], epochs)
    base = 2.0 ** words["base_learning_rate_exponent"] * 256
    early, late = sorted((one * epochs, other * epochs))
    assert 0 <= schedule.rate(early) <= base * (1 + 1e-12)
    if early >= warmup:
        assert schedule.rate(late) <= schedule.rate(early)
    if late < warmup:
        assert schedule.rate(0.0) == 0.0
        assert math.isclose(
            schedule.rate(early) * late, schedule.rate(late) * early, rel_tol=1e-9, abs_tol=1e-30
        )


@given(every_schedule, st.floats(0.01, 100.0))
def test_the_warm_up_ends_where_the_decay_begins(schedules, words, epochs):
    warmup = words["warmup_epochs"]
    assume(1e-3 < warmup < epochs)
    schedule = made(schedules, epochs, **words)
    before = schedule.rate(math.nextafter(warmup, 0.0))
    assert math.isclose(before, schedule.rate(warmup), rel_tol=1e-9)
    if words["lr_schedule"] != "stepped":
        base = 2.0 ** words["base_learning_rate_exponent"] * 256
        assert math.isclose(schedule.rate(warmup), base, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        # Of 105 epochs five are warm-up; the base is 2^-7 x 256.
        ("stepped", {5: 2, 52.4: 2, 52.5: 0.2, 78.7: 0.2, 78.75: 0.02, 105: 0.02}),
        ("cosine", {5: 2, 30: 1 + math.sqrt(0.5), 55: 1, 105: 0, 106: 0}),
        ("exponential", {5: 2, 6: 1.88, 7: 1.7672, 5.5: 2 * math.sqrt(0.94)}),
        ("polynomial_decay_lr", {5: 2, 30: 1.125, 55: 0.5, 105: 0, 106: 0}),
    ],
)
def test_rates_at_known_points(schedules, kind, points):
    schedule = made(schedules, 105.0, lr_schedule=kind)
    for epoch, rate in {0: 0, 1: 0.4, 2.5: 1.0, **points}.items():
        assert math.isclose(schedule.rate(epoch), rate, rel_tol=1e-12, abs_tol=1e-15), epoch


def test_the_highest_rate_goes_with_the_global_batch(schedules):
    for exponent, batch, rate in ((-7.0, 256, 2.0), (-8.0, 1920, 7.5), (-6.5, 32, 0.5 / 2**0.5)):
        words = {"base_learning_rate_exponent": exponent, "warmup_epochs": 0.0}
        schedule = made(schedules, global_batch=batch, **words)
        assert math.isclose(schedule.rate(0.0), rate)


def test_a_polynomial_ends_at_its_ratio(schedules):
    words = {"lr_schedule": "polynomial_decay_lr", "warmup_epochs": 0.0}
    schedule = made(schedules, 10.0, poly_power=1.0, poly_end_ratio=0.1, **words)
    assert [round(schedule.rate(epoch), 12) for epoch in (0, 5, 10, 20)] == [2.0, 1.1, 0.2, 0.2]


def test_each_step_may_have_a_factor(schedules):
    words = {"learning_rate_schedule": [0.3, 0.7], "warmup_epochs": 0.0}
    schedule = made(schedules, 10.0, learning_rate_decay=[0.5, 0.2], **words)
    rates = [schedule.rate(epoch) for epoch in (2.9, 3.0, 6.9, 7.0)]
    assert rates == pytest.approx([2.0, 1.0, 1.0, 0.2], rel=1e-12)


def test_other_numbers_of_factors_are_refused_in_one_line(schedules):
    with pytest.raises(ValueError, match=r"has 2 factors and .* 3 steps: give one factor, or as"):
        made(schedules, learning_rate_decay=[0.1, 0.2], learning_rate_schedule=[0.1, 0.2, 0.3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_may_end_in_its_warm_up(schedules, kind):
    schedule = made(schedules, 2.0, lr_schedule=kind)
    rates = [schedule.rate(epoch) for epoch in (0.0, 1.0, 2.0)]
    assert rates == pytest.approx([0.0, 0.4, 0.8], rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_values(schedules, kind):
    assert made(schedules, lr_schedule=kind) == made(schedules, lr_schedule=kind)
    with pytest.raises(AttributeError):
        made(schedules, lr_schedule=kind).base = 1.0
