"""The numbers that charts show, and the views after which they are sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poprun_py.running.metrics.metrics_feed import ChartRecorder, chart_values, training_step
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES


def instance(index, **changes):
    shares = {"computing": 0.75, "waiting": 0.25}
    state = InstanceState(
        index=index, phase="training", step=7, num_steps=6, samples_per_second=100.0,
        step_seconds=0.02, p95_seconds=0.03, own_seconds=0.01, memory_bytes=1024, loss=float(index),
        shares=tuple(shares.get(name, 0.0) for name in ACTIVITIES),
    )  # fmt: skip
    return replace(state, **changes)


def view(*states):
    return JobView(run_id="r", pid=1, program="p", seconds=1, instances=states)


def test_numbers_of_a_view():
    found = chart_values(view(instance(0), instance(1, loss=None, num_steps=0)))
    shares = {f"share_of_time/{name}": 0.0 for name in ACTIVITIES}
    assert found == {
        **shares,
        "samples_per_second/total": 200.0,
        "loss/mean": 0.0,
        "loss/instance-0": 0.0,
        "step_seconds/instance-0": 0.02,
        "step_p95_seconds/instance-0": 0.03,
        "step_own_seconds/instance-0": 0.01,
        "memory_bytes/instance-0": 1024.0,
        "memory_bytes/instance-1": 1024.0,
        "share_of_time/computing": 0.75,
        "share_of_time/waiting": 0.25,
    }


def test_the_loss_is_the_mean_over_instances():
    assert chart_values(view(instance(0), instance(3), instance(6)))["loss/mean"] == 3.0


def test_many_instances_are_summarized():
    found = chart_values(view(*map(instance, range(101))))
    assert {name: value for name, value in found.items() if name.startswith("loss/")} == {
        "loss/mean": 50.0, "loss/least": 0.0, "loss/median": 50.0, "loss/greatest": 100.0,
    }  # fmt: skip
    assert len(found) < 40


@pytest.mark.parametrize(
    ("steps", "expected"), [((), None), ((None, 0), None), ((None, 4), 4), ((6, 5), 5)]
)
def test_the_training_step_is_the_last_one_that_all_have_done(steps, expected):
    assert training_step(view(*(instance(i, step=s) for i, s in enumerate(steps)))) == expected


def test_numbers_are_sent_once_per_second_and_step_and_always_at_the_end():
    sent = []
    recorder = ChartRecorder(sent.append)
    recorder.steps([])
    for step, at in [(0, 0.0), (1, 1.0), (2, 1.5), (3, 2.0), (3, 3.0), (4, 4.0)]:
        recorder.view(view(instance(0, step=step)), at)
    recorder.view(view(instance(0, step=5, phase="ended")), 4.1)
    recorder.view(view(instance(0, step=5, phase="ended")), 4.2)
    assert sent[0] == {"begins": True}
    assert [document["step"] for document in sent[1:]] == [1, 3, 4, 5]
    assert sent[1]["values"]["loss/mean"] == 0.0
