"""Speedups, efficiencies, groups and remarks of comparisons."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.past_runs.comparison import (
    SAMPLES,
    SECONDS,
    STEPS,
    Spread,
    compare,
    remarks_on,
    slow_instances,
)
from poprun_py.past_runs.comparison_tables import comparison_lines
from poprun_py.past_runs.measured_run import Measured, Target
from poprun_py.running.watch.stragglers import Straggler

COUNTS = st.integers(1, 64)
SPEEDS = st.floats(0.1, 1e6)


def slow(instance, own_seconds, median_seconds):
    return Straggler(
        instance=instance, own_seconds=own_seconds, median_seconds=median_seconds, is_slow=True
    )


def run(name: str = "run", **numbers) -> Measured:
    usual = {"seconds": 10.0, "samples_per_second": 80.0, "batch": 8.0}
    usual |= {"step_seconds": 0.1, "mean_step_seconds": 0.1}
    return Measured(name=name, **{**usual, **numbers})


@given(st.lists(COUNTS, min_size=1, max_size=6), SPEEDS)
def test_ideal_runs_are_fully_efficient(counts, speed):
    runs = [run(f"r{n}", instances=n, replicas=n, samples_per_second=n * speed) for n in counts]
    comparison = compare(runs)
    for group in comparison.groups:
        assert group.efficiency == pytest.approx(1)
        assert group.efficiency_by_replicas == pytest.approx(1)
        assert group.speedup == pytest.approx(group.instances / counts[0])


@given(st.permutations(list(range(1, 6))), st.lists(SPEEDS, min_size=6, max_size=6))
def test_the_order_of_the_others_does_not_matter(order, speeds):
    base = run("base", samples_per_second=speeds[0])
    others = [run(f"r{n}", instances=n, samples_per_second=speeds[n]) for n in range(1, 6)]
    straight = {group.label: group for group in compare([base, *others]).groups}
    shuffled = compare([base, *(others[n - 1] for n in order)])
    assert {group.label: group for group in shuffled.groups} == straight


def test_the_first_run_is_the_base():
    slow, fast = run("slow", samples_per_second=50.0), run("fast", samples_per_second=100.0)
    assert [each.speedup for each in compare([slow, fast]).groups] == [1.0, 2.0]
    assert [each.speedup for each in compare([fast, slow]).groups] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("batches", "scaling"),
    [((8, 16, 32), "weak"), ((8, 8, 8), "strong"), ((8, 16, 16), ""), ((8, 12, 99), "")],
)
def test_the_kind_of_scaling_follows_from_the_global_batch(batches, scaling):
    runs = [
        run(f"r{n}", instances=n, replicas=n, batch=batch)
        for n, batch in zip((1, 2, 4), batches, strict=True)
    ]
    assert compare(runs).scaling == scaling


def test_runs_with_equal_numbers_of_instances_have_no_scaling():
    assert compare([run("a"), run("b", batch=16.0)]).scaling == ""


def test_the_measure_is_known_in_all_runs():
    silent = {"samples_per_second": None, "batch": None}
    runs = [run("a"), run("b")]
    assert compare(runs).measure == SAMPLES
    runs = [run("a"), run("b", instances=2, replicas=2, **silent)]
    assert compare(runs).measure == STEPS
    # Twice the replicas in the same time.
    assert compare(runs).groups[1].speedup == pytest.approx(2)
    none = [run(each.name, step_seconds=None, mean_step_seconds=None, **silent) for each in runs]
    assert compare(none).measure == SECONDS
    assert compare([none[0], replace(none[1], seconds=5.0)]).groups[1].speedup == 2


def test_a_run_without_a_speed_has_no_speedup():
    known, unknown = run("a"), run("b", samples_per_second=None, step_seconds=None)
    groups = compare([known, unknown]).groups
    assert [each.speedup for each in groups] == [1.0, None]
    assert [each.efficiency for each in compare([unknown, known]).groups] == [None, None]


def test_repetitions_are_grouped():
    runs = [
        run(f"{n}-{repeat}", instances=n, samples_per_second=n * 100.0 + repeat)
        for repeat in (1, 2, 3)
        for n in (1, 2)
    ]
    one, two = compare(runs, grouped=True).groups
    assert one.label == "1-1 + 2"
    assert one.speed == Spread((101.0, 102.0, 103.0))
    assert one.speed.to_json() == {
        "median": 102.0, "mean": 102.0, "min": 101.0, "max": 103.0, "runs": 3,
    }  # fmt: skip
    assert two.speedup == pytest.approx(202 / 102)
    assert len(compare(runs).groups) == 6
    other = replace(runs[0], program=("train.py", "--lr", "1"))
    assert len(compare([*runs, other], grouped=True).groups) == 3


def test_repetitions_that_did_not_reach_the_target_are_counted():
    target = Target("accuracy", 0.9)
    runs = [run("a", reached=3.0), run("b"), run("c", reached=4.0)]
    comparison = compare(runs, target=target, grouped=True)
    assert comparison.remarks == ("a + 2: 2 of 3 runs reached accuracy>=0.9",)
    assert comparison.base.numbers["reached"].median == 3.5


@pytest.mark.parametrize("speeds", [(float("nan"), 80.0), (80.0, float("nan"))])
def test_a_nan_speed_has_no_speedup(speeds):
    runs = [run(f"r{n}", samples_per_second=speed) for n, speed in enumerate(speeds)]
    comparison = compare(runs)
    assert {each.speedup for each in comparison.groups} <= {None, 1.0}
    assert comparison.groups[1].efficiency is None
    json.dumps(comparison.to_json(), allow_nan=False)


def test_a_nan_loss_is_null_in_json():
    comparison = compare([run("a", loss=float("nan")), run("b", loss=1.0)])
    found = comparison.to_json()["runs"]
    assert [each["loss"]["median"] for each in found] == [None, 1.0]
    assert "nan" in comparison_lines(comparison, width=100)[2]


def test_equal_runs_need_no_remark():
    runs = [run("a", program=("train.py",)), run("b", program=("train.py",), instances=2)]
    assert remarks_on(runs) == ()


def test_a_slow_instance_is_mentioned_once_for_all_runs():
    runs = [run(name, instances=2, slowest=slow(1, 0.02, 0.01)) for name in "ab"]
    other = run("d", program=("other.py",), instances=2, slowest=slow(1, 0.03, 0.01))
    assert slow_instances([*runs, run("c", instances=2), other]) == (
        "instance 1 of 2 is slow (a, b): a step takes 20 ms without waiting for other "
        "instances, and 10 ms in the median instance",
        "instance 1 of 2 is slow (d): a step takes 30 ms without waiting for other instances, "
        "and 10 ms in the median instance",
    )


def test_remarks_on_unfair_differences():
    first = run(
        "a", program=("/x/train.py",), hosts=("one",), versions={"torch": "2.9", "x": "1"}, steps=20
    )
    second = run(
        "b", program=("/x/other.py", "--lr", "1"), hosts=("one", "two"), batch=16.0,
        versions={"torch": "2.8", "y": "1"}, steps=30, exit_code=3,
    )  # fmt: skip
    assert remarks_on([first, second]) == (
        "different programs: train.py (a), other.py (b)",
        "different arguments: none (a), --lr 1 (b)",
        "different versions of torch: 2.9 (a), 2.8 (b)",
        "different hosts: one (a), one,two (b)",
        "different numbers of steps: 20 (a), 30 (b)",
        "different global batches: 8 (a), 16 (b)",
        "b ended with exit code 3",
    )
    many = [replace(first, name=f"r{n}", program=("/x/train.py",)) for n in range(5)]
    elsewhere = replace(first, name="z", program=("/y/train.py",))
    assert remarks_on([*many, elsewhere]) == (
        "different programs: /x/train.py (r0, r1, r2 and 2 more), /y/train.py (z)",
    )


@pytest.mark.parametrize(
    ("changed", "remark"),
    [
        ({"exit_code": None}, "b has not ended"),
        ({"attempts": 3}, "b needed 3 attempts; its duration includes all of them"),
        ({"resumed_step": 40}, "b continued from the checkpoint of step 40"),
    ],
)
def test_remarks_on_incomplete_runs(changed, remark):
    assert remarks_on([run("a"), run("b", **changed)]) == (remark,)
