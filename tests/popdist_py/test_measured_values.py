"""Values that were measured on this machine and are known to later jobs."""

from __future__ import annotations

import json

import pytest

from popdist_py import measured_values


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "popdist"


def test_a_value_is_recalled_by_its_key_and_machine(monkeypatch):
    measured_values.remember("speeds", "a", [1, 2])
    measured_values.remember("speeds", "b", "fast")
    assert measured_values.recall("speeds", "a") == [1, 2]
    assert measured_values.recall("speeds", "b") == "fast"
    assert measured_values.recall("speeds", "c") is None
    assert measured_values.recall("others", "a") is None
    monkeypatch.setattr(measured_values.platform, "node", lambda: "another")
    assert measured_values.recall("speeds", "a") is None


def test_what_was_stored_first_goes_first(folder, monkeypatch):
    monkeypatch.setattr(measured_values, "_MOST_VALUES", 2)
    for key in ("a", "b", "a", "c"):
        measured_values.remember("speeds", key, key)
    assert [measured_values.recall("speeds", key) for key in "abc"] == ["a", None, "c"]
    assert len(json.loads((folder / "speeds.json").read_text())) == 2


def test_a_folder_that_cannot_be_made_holds_nothing(folder):
    folder.write_text("a file in its place")
    measured_values.remember("speeds", "a", 1)
    assert measured_values.recall("speeds", "a") is None
