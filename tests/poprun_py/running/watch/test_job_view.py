"""The headline and the table of a view, and the five lines at the end of a job."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.terminals import colours_of, plain_lines

from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView, headline, summary_lines, table_lines
from poprun_py.running.watch.phases import ACTIVITIES, Phases
from poprun_py.running.watch.stragglers import Straggler, slowest


def instance(index, **given):
    """Return the state of an instance that trains."""
    shares = {"computing": 0.5, "loading": 0.1, "reducing": 0.05, "waiting": 0.3, "other": 0.05}
    state = InstanceState(
        index=index,
        host="node1",
        pid=100 + index,
        phase="training",
        step=1234,
        num_steps=1233,
        samples_per_second=512.0,
        step_seconds=0.0153,
        p95_seconds=0.0171,
        own_seconds=0.0107,
        shares=tuple(shares.get(name, 0.0) for name in ACTIVITIES),
        cpu=0.97,
        num_cpus=4,
        memory_bytes=345 << 20,
    )
    return replace(state, **given)


SLOW = Straggler(
    instance=2,
    host="node1",
    own_seconds=0.015,
    median_seconds=0.0107,
    is_slow=True,
    cause="it loads data longer",
    detail="40% of its time",
)


def view(*states, worst=None, **given):
    facts = {"run_id": "20260101-120000-abcdef", "pid": 42, "program": "train.py", "seconds": 3725}
    return JobView(instances=states, worst=worst, **{**facts, **given})


JOBS = {
    "training": view(*map(instance, range(2)), instance(2, own_seconds=0.015), worst=SLOW),
    "starting": view(
        instance(0, phase="compiling", step=0, num_steps=0, samples_per_second=0.0),
        InstanceState(index=1, host="node2", phase="running"),
        seconds=4,
    ),
    "alone": view(instance(0, samples_per_second=0.0, memory_bytes=9 << 30)),
}


@pytest.mark.parametrize("name", JOBS)
def test_table(name, golden):
    golden(f"{name}.txt", "\n".join(table_lines(JOBS[name], width=200)) + "\n")


@pytest.mark.parametrize("name", JOBS)
def test_summary(name, golden):
    golden(f"{name}_summary.txt", "".join(f"{line}\n" for line in summary_lines(JOBS[name])))


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_drops_columns_but_no_instance_and_not_the_wait(width):
    lines = table_lines(JOBS["training"], width=width)
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("instance"))
    assert "phase" in header
    assert "step ms" in header
    assert "wait" in header
    assert "it loads data longer (40% of its time)" in " ".join(lines)
    for line in lines[-3:]:
        assert "training" in line
        assert "…" not in line


def test_a_wider_terminal_shows_more():
    headers = [
        len(next(x for x in table_lines(JOBS["training"], width=w) if "phase" in x).split())
        for w in (40, 60, 80, 100, 200)
    ]
    assert headers == sorted(headers)
    assert headers[-1] > headers[0]


def test_the_longest_steps_are_shown_if_there_are_more_instances_than_rows():
    states = [instance(index, own_seconds=0.001 * (index % 7)) for index in range(64)]
    lines = table_lines(view(*states, worst=slowest(states)), width=150, most_rows=9)
    rows = [line for line in lines if "training" in line]
    assert len(rows) == 8
    assert {int(line.split()[0]) % 7 for line in rows} == {6}
    assert lines[-1] == "and 56 more instances whose steps are shorter"


def test_the_smallest_window_shows_one_row_and_does_not_mention_missing_steps():
    states = [InstanceState(index=index, phase="running") for index in range(4)]
    lines = table_lines(view(*states), width=80, most_rows=1)
    assert sum("running" in line for line in lines) == 1
    assert lines[-1] == "and 3 more instances"


def test_the_table_says_why_a_job_shows_no_steps():
    running = InstanceState(index=0, phase="running")
    (*table, reason) = table_lines(view(running), width=200, with_reason=True)
    assert reason == (
        "no steps: so far, the program has neither called a PopTorch model, nor stepped an "
        "optimizer of torch in its main process, nor called popdist_py.heartbeat.step()"
    )
    assert table == table_lines(view(running), width=200)
    for states in ((), (running, instance(1))):
        with_reason = table_lines(view(*states), width=200, with_reason=True)
        assert with_reason == table_lines(view(*states), width=200)


def test_the_table_says_that_counting_is_off():
    off = replace(view(InstanceState(index=0, phase="running")), counts_optimizers=False)
    assert JobView.from_json(off.to_json()) == off
    assert "counts_optimizers" not in view().to_json()
    assert table_lines(off, width=200, with_reason=True)[-1] == (
        "no steps: so far, the program has neither called a PopTorch model nor "
        "popdist_py.heartbeat.step(), and POPDIST_COUNT_STEPS=no turns off counting the steps of "
        "torch's optimizers"
    )


def test_the_straggler_is_coloured_only_if_colours_are_on():
    plain = table_lines(JOBS["training"], width=150)
    painted = "\n".join(table_lines(JOBS["training"], width=150, colour=True))
    assert "yellow" in colours_of(painted)
    assert plain_lines(painted) == plain


def test_no_instance_is_named_if_none_is_slow():
    states = [instance(0), instance(1, own_seconds=0.0109)]
    assert headline(view(*states, worst=slowest(states)))[1] == ("slowest: no instance stands out")
    quick = [instance(0, own_seconds=2e-4), instance(1, own_seconds=6e-4)]
    assert headline(view(*quick, worst=slowest(quick)))[1] == ("slowest: no instance stands out")


def test_the_summary_names_the_time_outside_of_the_steps():
    phases = Phases(
        launch=1.0, imports=4.0, program=10.0, before_steps={"other": 1.0, "compiling": 1.0},
        in_steps={"other": 0.5, "computing": 3.0}, after_steps={"other": 0.5},
    )  # fmt: skip
    summary = summary_lines(view(instance(0, phases=phases)))
    assert summary[2] == (
        "time: computing 30%, compiling 10%, imports 40%, preparation 10%, own code in steps 5%, "
        "the end 5%"
    )
    unknown = summary_lines(view(instance(0, phases=phases), instance(1)))
    assert "imports" not in unknown[2]


def test_a_job_without_steps_has_no_summary():
    assert summary_lines(view(InstanceState(index=0))) == []


@pytest.mark.parametrize("name", JOBS)
def test_a_view_survives_json(name):
    data = json.loads(json.dumps(JOBS[name].to_json()))
    assert table_lines(JobView.from_json(data), width=200) == table_lines(JOBS[name], width=200)
