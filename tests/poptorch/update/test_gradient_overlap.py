"""The choice of reducing gradients in backward, or after it: what measured faster is taken."""

from __future__ import annotations

from popdist_py.poptorch.update.gradient_buckets import Autotuner


def test_autotuner_takes_what_measured_faster(monkeypatch):
    seconds = {False: 0.003, True: 0.001}
    clock = [0.0]
    monkeypatch.setattr(
        "popdist_py.poptorch.update.gradient_buckets.time.perf_counter", lambda: clock[0]
    )
    tuner = Autotuner(lambda number: number)
    chosen = []
    for _ in range(14):
        way = tuner.begin()
        clock[0] += seconds[way]
        tuner.end()
        chosen.append(way)
    assert chosen[:10] == [False, True] * 5
    assert chosen[10:] == [True] * 4


def test_autotuner_of_long_steps_ends_early(monkeypatch):
    seconds = iter([9.0, 9.0, 1.0, 0.9, 1.0, 1.5])
    clock = [0.0]
    monkeypatch.setattr(
        "popdist_py.poptorch.update.gradient_buckets.time.perf_counter", lambda: clock[0]
    )
    tuner = Autotuner(lambda number: number)
    for step_seconds in seconds:
        tuner.begin()
        clock[0] += step_seconds
        tuner.end()
    assert tuner.begin() is True  # 1.5 was a disturbance


def test_autotuner_decides_by_the_slowest_instance():
    # How long the first steps took, the second way, the first way.
    elsewhere = iter([0.1, 2.0, 1.0])
    tuner = Autotuner(lambda _: next(elsewhere))
    for _ in range(10):
        tuner.begin()
        tuner.end()
    assert tuner.begin() is False  # the second way took 2.0 somewhere, the first 1.0
