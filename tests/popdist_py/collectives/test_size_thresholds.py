"""The measured limit between two ways of reducing, and the file that remembers it."""

from __future__ import annotations

import time

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


def test_measuring_takes_at_most_20_ms_and_counts_meetings():
    def measured():
        start = time.perf_counter()
        meeting, per_byte = size_thresholds.measure(lambda: time.sleep(1e-4))
        return time.perf_counter() - start, meeting, per_byte

    # Other work on this machine only makes a number larger.
    seconds, meeting, per_byte = map(min, zip(*(measured() for _ in range(20)), strict=True))
    assert seconds < 0.02
    assert 1e-4 <= meeting < 1e-3
    assert 0 < per_byte < 1e-8


def test_a_meeting_that_other_work_disturbed_does_not_count():
    calls = iter(range(1000))
    meeting, _ = size_thresholds.measure(lambda: time.sleep(1e-2 if next(calls) == 3 else 1e-4))
    assert meeting < 1e-3
