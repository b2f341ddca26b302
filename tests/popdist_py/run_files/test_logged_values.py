"""What a program logs: a line for each step, read back as it was."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.run_files import logged_values, place
from popdist_py.run_files.logged_values import append_line, log_values

NUMBERS = st.dictionaries(st.text(max_size=8), st.floats(), max_size=4)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of this process."""
    monkeypatch.setattr(place, "_owner", (os.getpid(), str(tmp_path / "instance-0")))
    monkeypatch.setattr(logged_values, "_has_failed", False)
    return tmp_path / "instance-0.values.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@given(values=NUMBERS, step=st.integers(0, 1 << 62))
def test_numbers_are_read_back_as_they_were(tmp_path_factory, values, step):
    path = tmp_path_factory.mktemp("values") / "instance-0.values.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "_owner", (os.getpid(), str(path).removesuffix(".values.jsonl")))
        log_values(step, values)
    (line,) = read(path)
    assert line["step"] == step
    assert repr(line["values"]) == repr(values)  # NaN too, and -0.0


def test_lines_follow_one_another_for_the_owner_alone(path):
    for step in (1, 2):
        log_values(step, {"loss": 1 / step})
    first, second = read(path)
    assert (first["step"], second["step"]) == (1, 2)
    assert second["at"] == pytest.approx(time.time(), abs=3600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_numbers_that_are_not_finite_are_those_of_python(path):
    log_values(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert '{"a": NaN, "b": Infinity, "c": -Infinity}' in path.read_text()


def test_a_failure_is_one_warning(path, caplog):
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "popdist"):
        log_values(1, {"loss": 1.0})
        log_values(2, {"loss": 1.0})
    (warning,) = caplog.messages
    assert (
        warning
        == f"logged values are no longer written to {path} (No space left on device); training "
        "continues"
    )


def test_a_file_has_an_upper_size(path):
    append_line(path, "x" * 9, 20)
    append_line(path, "y" * 9, 20)
    with pytest.raises(OSError, match="the file has reached its limit of 0 MiB"):
        append_line(path, "z", 20)
    assert path.read_text() == f"{'x' * 9}\n{'y' * 9}\n"


def test_a_forked_process_writes_nothing(path, monkeypatch):
    monkeypatch.setattr(place, "_owner", (os.getpid() + 1, place._owner[1]))
    log_values(1, {"loss": 1.0})
    assert not path.exists()
