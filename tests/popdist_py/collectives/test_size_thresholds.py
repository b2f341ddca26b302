"""The measured limit between two ways of reducing, and the file that stores the limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from popdist_py.collectives import size_thresholds


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "popdist" / "crossover.json"


def test_what_was_measured_is_recalled_for_jobs_of_the_same_kind(cache):
    size_thresholds.remember(3, 2, 1234)
    size_thresholds.remember(4, 2, 99)
    assert [
        size_thresholds.recall(3, 2),
        size_thresholds.recall(4, 2),
        size_thresholds.recall(3, 8),
    ] == [
        1234,
        99,
        None,
    ]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\x00"])
def test_a_broken_file_is_measured_anew_and_replaced(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert size_thresholds.recall(3, 2) is None
    size_thresholds.remember(3, 2, 7)
    assert size_thresholds.recall(3, 2) == 7


def test_the_shortest_round_is_the_time_of_a_barrier(monkeypatch):
    # In this clock only barriers take time. Other work disturbs the first three rounds of barriers.
    now, calls = 0.0, iter(range(1000))

    def barrier():
        nonlocal now
        now += 0.25 + (next(calls) < 15)

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(size_thresholds, "time", clock)
    assert size_thresholds.measure(barrier) == (0.25, 0.0)
    assert next(calls) == 1 + 4 * 5  # one barrier before the clock runs, and four rounds of five


def test_reducing_a_byte_takes_time_and_less_than_a_barrier():
    event = threading.Event()
    barrier, byte = size_thresholds.measure(lambda: event.wait(1e-3))
    assert 0 < byte < barrier
