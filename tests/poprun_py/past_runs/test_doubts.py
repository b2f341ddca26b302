"""Reasons why figures of comparisons cannot be trusted, and their marks in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poprun_py.past_runs.comparison import compare
from poprun_py.past_runs.comparison_tables import comparison_lines, scaling_lines
from poprun_py.past_runs.doubts import spread_of
from poprun_py.past_runs.measured_run import Measured
from poprun_py.past_runs.pages.comparison_page import scaling_page
from poprun_py.past_runs.run_conditions import Conditions

QUIET = Conditions(threads=(1,), num_cpus=2, cpus_of_others=0.02, num_steps=90, step_variation=0.01)


def run(name, speed=80.0, instances=1, **conditions):
    return Measured(
        name=name, instances=instances, replicas=instances, seconds=10.0, step_seconds=0.1,
        samples_per_second=speed, batch=8.0, conditions=replace(QUIET, **conditions),
    )  # fmt: skip


def doubts(*runs, grouped=False):
    """Return the lines about doubts, and the label of each group with its causes."""
    comparison = compare(runs, grouped=grouped)
    lines = comparison_lines(comparison, width=200)
    causes = {
        each["runs"][0]: [doubt["cause"] for doubt in each["doubts"]]
        for each in comparison.to_json()["runs"]
    }
    return [line for line in lines if line.startswith("* ")], causes


def cells(lines, title):
    column = lines[0].index(title)
    return [line[column : column + len(title) + 1].strip() for line in lines[2:4]]


def test_quiet_runs_have_no_doubts():
    assert doubts(run("a"), run("b", 150.0, 2)) == ([], {"a": [], "b": []})


@pytest.mark.parametrize(
    ("conditions", "speed", "cause", "line"),
    [
        ({"cpus_of_others": 0.8}, 80.0, "other_load",
         "* other programs used CPUs of the job: 0.8 of 2 (b)"),
        ({"shares_cores": True}, 80.0, "shared_cores", "* other jobs used the same cores: b"),
        ({"instances_per_cpu": 3}, 80.0, "crowded_cpus",
         "* several instances share a CPU: 3 on one CPU (b)"),
        ({"throttled": 0.25}, 80.0, "cpu_limit",
         "* a limit of CPU time stopped an instance: 25% of the time (b)"),
        ({"threads": (2,)}, 80.0, "threads",
         "* the instances of the runs have different numbers of threads: 2 instead of 1 (b); "
         "--cores-per-instance makes the numbers equal"),
        ({"num_steps": 4}, 80.0, "few_steps",
         "* too few steps were timed: 4 steps (b); let the program make more steps"),
        ({"step_variation": 0.2}, 88.0, "small_difference",
         "* the variation of a run is larger than the difference between the runs: "
         "20% against 10% (b)"),
    ],
)  # fmt: skip
def test_each_cause_has_a_line(conditions, speed, cause, line):
    assert doubts(run("a"), run("b", speed, **conditions)) == ([line], {"a": [], "b": [cause]})


def test_values_below_the_limits_cause_no_doubt():
    calm = run("b", 88.0, cpus_of_others=0.15, throttled=0.04, num_steps=10, step_variation=0.09)
    assert doubts(run("a"), calm)[0] == []
    assert doubts(run("a"), run("b", threads=()))[0] == []
    assert doubts(run("a"), run("b", 80.2, step_variation=0.2))[0] == []  # it is shown as 1.00x


def test_an_efficiency_over_110_percent():
    lines, causes = doubts(run("a"), run("b", 200.0, 2))
    assert causes["b"] == ["efficiency"]
    assert lines == [
        "* an efficiency over 110 % is seldom real: 125% (b); "
        "check whether other programs disturbed the first run"
    ]
    assert doubts(run("a"), run("b", 174.0, 2))[0] == []
    assert doubts(run("a"), run("b", 200.0))[0] == []  # a faster program with as many instances


def test_repetitions_that_differ_much():
    runs = [run(f"a{n}", speed) for n, speed in enumerate((80.0, 90.0, 100.0))]
    lines, _ = doubts(*runs, grouped=True)
    assert lines == ["* the repetitions of a run differ much: by 22% (a0 + 2)"]
    assert spread_of(()) == spread_of((0.0,)) == 0


def test_a_difference_within_the_repetitions():
    others = [replace(run(f"b{n}", speed), hosts=("x",)) for n, speed in enumerate((83.0, 85.0))]
    lines, _ = doubts(run("a0", 80.0), run("a1", 85.0), *others, grouped=True)
    assert lines == [
        "* the variation of a run is larger than the difference between the runs: "
        "6.1% against 1.8% (b0 + 1)"
    ]


def test_doubts_about_the_base_mark_every_row():
    table = comparison_lines(compare([run("a", cpus_of_others=1.5), run("b", 150.0, 2)]), width=200)
    assert cells(table, "speedup") == ["1.00x*", "1.88x*"]
    assert cells(table, "efficiency") == ["100%*", "94%*"]
    table = comparison_lines(compare([run("a"), run("b", 150.0, 2, cpus_of_others=1.5)]), width=200)
    assert cells(table, "speedup") == ["1.00x", "1.88x*"]


def test_a_scaling_names_numbers_of_instances():
    runs = [run("n1", threads=(2,)), run("n2", 150.0, 2), run("n4", 250.0, 4)]
    comparison = compare(runs, grouped=True)
    line = (
        "* the instances of the runs have different numbers of threads: "
        "1 instead of 2 (2 instances), 1 instead of 2 (4 instances); "
        "--cores-per-instance makes the numbers equal"
    )
    assert line in scaling_lines(comparison, width=200)
    page = scaling_page(comparison, (1, 2, 4))
    assert "1 instead of 2 (4 instances)" in page
    assert "78%*" in page
