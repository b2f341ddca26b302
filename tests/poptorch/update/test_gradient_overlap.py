"""The trial of reducing gradients in backward, or after it: what measured faster is taken."""

from __future__ import annotations

from popdist_py.poptorch.update.gradient_buckets import Trial


def test_trial_takes_what_measured_faster(monkeypatch):
    seconds = {False: 0.003, True: 0.001}
    clock = [0.0]
    monkeypatch.setattr(
        "popdist_py.poptorch.update.gradient_buckets.time.perf_counter", lambda: clock[0]
    )
    trial = Trial(lambda number: number)
    chosen = []
    for _ in range(14):
        way = trial.begin()
        clock[0] += seconds[way]
        trial.end()
        chosen.append(way)
    assert chosen[:10] == [False, True] * 5
    assert chosen[10:] == [True] * 4


def test_trial_of_long_steps_ends_early(monkeypatch):
    seconds = iter([9.0, 9.0, 1.0, 0.9, 1.0, 1.5])
    clock = [0.0]
    monkeypatch.setattr(
        "popdist_py.poptorch.update.gradient_buckets.time.perf_counter", lambda: clock[0]
    )
    trial = Trial(lambda number: number)
    for step_seconds in seconds:
        trial.begin()
        clock[0] += step_seconds
        trial.end()
    assert trial.begin() is True  # 1.5 was a disturbance


def test_trial_decides_by_the_slowest_instance():
    # How long the first steps took, the second way, the first way.
    elsewhere = iter([0.1, 2.0, 1.0])
    trial = Trial(lambda _: next(elsewhere))
    for _ in range(10):
        trial.begin()
        trial.end()
    assert trial.begin() is False  # the second way took 2.0 somewhere, the first 1.0
