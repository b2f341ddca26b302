"""The work of the launcher's loop in jobs of many instances, measured in function calls."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from poprun_py.running.attempt_files import FileRecorder
from poprun_py.running.metrics.metrics_feed import EndpointRecorder, chart_values
from poprun_py.running.supervise.activity_monitor import ActivitySample
from poprun_py.running.supervise.hang_detection import HangDetector
from poprun_py.running.supervise.launch_result import Progress
from poprun_py.running.supervise.stacks import blocking_by_stacks, group_stacks
from poprun_py.running.watch.job_observer import JobObserver, RoundTimes
from poprun_py.running.watch.job_view import JobView, summary_lines, table_lines
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.records import Recorders, StepRecord

COUNT = 512
MOST_CALLS = 400 * COUNT  # less than one call for each pair of instances


def message(index, steps):
    """Return the message of an instance's wrapper after ``steps`` steps of 50 ms."""
    ns, now = 50_000_000, 1000 * 10**9 + steps * 50_000_000
    own = 20_000_000 + index % 7 * 500_000 + (25_000_000 if index % 8 == 1 else 0)
    spent = {"computing": steps * own, "waiting": steps * (ns - own)}
    return {
        "progress": [steps, 0, 0, 0],
        "memory_bytes": 1 << 30,
        "cpus": [0, 1],
        "started": 1000 * 10**9,
        "now": now,
        "ledger": {
            "now": now,
            "began": 1,
            "activity": 2,
            "since": now,
            "nanoseconds": [spent.get(each, 0) for each in ACTIVITIES],
            "samples": steps * 8,
            "timed": steps,
            "steps": [ns] * 20,
            "own": [own] * 10,
            "loss": 0.5,
        },
    }


class Job:
    """A job whose instances answer at once. An eighth of them is slow."""

    def __init__(self):
        self.asked, self.views = [], []
        self.observer = JobObserver(
            job=JobView(run_id="r", pid=1, program="train.py"), began=0.0, ask=self.asked.append,
            times=RoundTimes.of(COUNT, is_live=True, is_recorded=False), tell=lambda _: None,
            show=lambda view, _: self.views.append(view), recorders=Recorders([], print),
            epoch=lambda: 0.0,
        )  # fmt: skip
        for index in range(COUNT):
            self.observer.started(index, f"node{index // 8}", 1000 + index, 0.0)

    def play_round(self, calls, now, steps):
        """Answer for all instances, and return the most calls in one step of the loop."""
        self.observer.request(lambda _: None, now)
        most = 0
        while self.asked:
            for index in self.asked[:]:
                told = message(index, steps)
                observed = partial(self.observer.observed, index, told, now)
                most = max(most, calls(observed))
            self.asked.clear()
            now += 0.1
            most = max(most, calls(partial(self.observer.on_time, now)))
        return most


@pytest.fixture(scope="module")
def job(calls):
    made = Job()
    most = max(made.play_round(calls, 10.0 * steps, 20 * steps) for steps in (1, 2))
    return made, most


def test_a_round_is_done_in_short_steps(job):
    made, most = job
    assert len(made.views) == 2
    assert {each.step for each in made.views[-1].instances} == {40}
    assert 0 < most < MOST_CALLS


def test_only_some_instances_are_asked_at_once():
    made = Job()
    made.observer.on_time(10.0)
    assert 0 < len(made.asked) < COUNT / 2
    assert made.observer.next_deadline() < 10.1
    made.observer.ended(4000, {"ledger": None}, 10.0)
    asked = set()
    for turn in range(100):
        asked |= set(made.asked)
        made.observer.on_time(10.0 + turn / 10)
    assert asked == set(range(COUNT)) - {4000}


def test_the_joined_json_text_of_a_view_equals_that_of_its_values(job):
    view = job[0].views[-1]
    assert view.json_text() == json.dumps(view.to_json())
    assert len(view.json_text()) > 1 << 17
    empty = JobView(run_id='"r', pid=1, program="x", seconds=1.0, instances=())
    assert empty.json_text() == json.dumps(empty.to_json())


def every_task(view, folder):
    """Yield the name and the function of each task that the launcher repeats during a job."""
    file, endpoint = FileRecorder(folder), EndpointRecorder(lambda text: text.encode(), 0)
    for index in range(COUNT):
        endpoint.steps([StepRecord(at=1.0, instance=index, step=1, seconds=0.05, own_seconds=0.02)])
    steps, activity = HangDetector("auto"), HangDetector("auto")
    for index in range(COUNT):
        for step in range(8):
            steps.record_progress(index, Progress(step), 0.05 * step)
        activity.activity.add(index, 0.0)
        activity.activity.record(index, ActivitySample(at=1.0), 1.0)
    stack = 'Thread 0x%x (most recent call first):\n  File "%s", line 40 in function\n'
    stacks = {i: [{"text": stack % (i, os.__file__), "state": "S"}] for i in range(COUNT)}
    groups, everybody = group_stacks(stacks), tuple(range(COUNT))
    yield "status", view.json_text
    yield "file recorder", lambda: file.view(view, 1e9)
    yield "endpoint", lambda: endpoint.view(view, 1e9)
    yield "numbers for charts", lambda: chart_values(view)
    yield "live view", lambda: table_lines(view, width=160, most_rows=20)
    yield "summary", lambda: summary_lines(view)
    yield "hangs, by steps", lambda: steps.hung(2.0)
    yield "hangs, blocked", lambda: steps.check(2.0, is_blocked=True)
    yield "hangs, by activity", lambda: activity.hung(2.0)
    yield "hangs, idle", lambda: activity.hung(1e6)
    yield "blocking instances", lambda: blocking_by_stacks(everybody, {}, groups)
    file.close()


def test_each_repeated_task_makes_few_calls_for_each_instance(job, calls, tmp_path):
    made = {name: calls(task) for name, task in every_task(job[0].views[-1], tmp_path)}
    assert {name: each for name, each in made.items() if each > MOST_CALLS} == {}


def test_an_event_does_not_search_all_steps_for_hangs_again(calls):
    """The launcher serves thousands of events per second, and checks for hangs after each."""
    detector = HangDetector("auto")
    for index in range(COUNT):
        for step in range(8):
            detector.record_progress(index, Progress(step), 0.05 * step)
    detector.check(1.5, is_blocked=False)
    assert calls(lambda: detector.check(1.6, is_blocked=False)) < 10
    # A hang is found as soon as its time-out has passed.
    for number in range(100):
        assert detector.check(1.5 + number / 10, is_blocked=False) == ()
    assert len(detector.check(11.51, is_blocked=False)) == COUNT
