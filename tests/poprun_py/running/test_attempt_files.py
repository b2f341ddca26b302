"""The files of steps and views, with their size limits, also on a full disk."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.attempt_files import FileRecorder
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord

VIEW = JobView(
    run_id="r", pid=1, program="x", seconds=1.0, instances=(InstanceState(index=0, loss=0.5),)
)


def step(number, **values):
    return StepRecord(
        at=1e9 + number, instance=0, step=number, seconds=0.5, own_seconds=0.25, **values
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_written_at_once_and_only_readable_by_the_owner(tmp_path):
    recorder = FileRecorder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    recorder.steps([step(1, samples=8, loss=2.5), step(2)])
    recorder.view(VIEW, 1e9 + 2)
    first, second = lines(tmp_path / "steps.jsonl")
    assert first == {
        "at": 1e9 + 1, "instance": 0, "step": 1, "seconds": 0.5, "own_seconds": 0.25,
        "samples": 8, "loss": 2.5,
    }  # fmt: skip
    assert "loss" not in second
    (look,) = lines(tmp_path / "looks.jsonl")
    assert look == {"at": 1e9 + 2, **VIEW.to_json()}
    for name in ("steps.jsonl", "looks.jsonl"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    recorder.close()


records = st.builds(
    StepRecord,
    at=st.floats(0, 4e9),
    instance=st.integers(0, 1000),
    step=st.integers(0, 2**62),
    seconds=st.floats(0, 1e6),
    own_seconds=st.floats(0, 1e6),
    samples=st.integers(0, 2**62),
    loss=st.none() | st.floats(),
    every=st.sampled_from([1, 8, 64]),
)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(records)
def test_every_step_record_survives_json(record):
    again = StepRecord.from_json(strict(json.dumps(record.to_json(), allow_nan=False)))
    assert repr(again.loss) == repr(record.loss)
    rounded = replace(
        record,
        at=round(record.at, 6),
        seconds=round(record.seconds, 9),
        own_seconds=round(record.own_seconds, 9),
    )
    assert replace(again, loss=None) == replace(rounded, loss=None)


@pytest.mark.parametrize("loss", [None, 1.5, math.nan, math.inf, -math.inf])
def test_a_view_with_any_loss_survives_json(loss):
    view = replace(VIEW, instances=(InstanceState(index=0, loss=loss),))
    again = JobView.from_json(strict(json.dumps(view.to_json(), allow_nan=False)))
    assert repr(again.instances[0].loss) == repr(loss)


def test_a_long_run_keeps_every_eighth_then_every_64th(tmp_path):
    part = 10_000
    recorder = FileRecorder(tmp_path, part)
    for first in range(1, 20_001, 10):
        recorder.steps([step(number) for number in range(first, first + 10)])
    recorder.close()
    kept = lines(tmp_path / "steps.jsonl")
    sizes = [each.get("every", 1) for each in kept]
    assert sorted(set(sizes)) == [1, 8, 64, 512]
    assert sizes == sorted(sizes)
    assert all(each["step"] % each.get("every", 1) == 0 for each in kept)
    for every in (1, 8, 64):
        numbers = [each["step"] for each in kept if each.get("every", 1) == every]
        assert numbers == list(range(numbers[0], numbers[-1] + 1, every))
    assert (tmp_path / "steps.jsonl").stat().st_size < 5 * part


def test_a_long_run_keeps_fewer_views_but_always_the_last(tmp_path):
    part = 20_000
    recorder = FileRecorder(tmp_path, part)
    for number in range(1, 2000):
        recorder.view(VIEW, float(number))
    recorder.close()
    kept = lines(tmp_path / "looks.jsonl")
    assert sorted({each.get("every", 1) for each in kept}) == [1, 8, 64, 512]
    assert kept[-1]["at"] == 1999.0
    assert len(kept) < 200
    assert len({each["at"] for each in kept}) == len(kept)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.symlink_to("/dev/full")
    recorder = FileRecorder(tmp_path)
    with pytest.raises(OSError, match="No space left on device") as caught:
        recorder.steps([step(1)])
    assert caught.value.filename == str(path)
    recorder.close()


def test_a_missing_folder_is_an_error_and_close_ignores_it(tmp_path):
    recorder = FileRecorder(tmp_path / "gone", 1)
    with pytest.raises(FileNotFoundError):
        recorder.view(VIEW, 1.0)
    recorder.close()
