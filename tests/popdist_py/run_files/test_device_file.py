"""The file about compiled models: whole at any time, the last one of a name and mode in it."""

from __future__ import annotations

import json
import os
import stat

import pytest

from popdist_py.run_files import device_file, place


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of this process."""
    monkeypatch.setattr(place, "_owner", (os.getpid(), str(tmp_path / "instance-0")))
    monkeypatch.setattr(device_file, "_models", {})
    return tmp_path / "instance-0.device.json"


def test_models_are_kept_by_name_and_mode(path):
    for name, mode, size in (("A", "training", 1), ("A", "inference", 2), ("A", "training", 3)):
        device_file.keep_model({"name": name, "mode": mode, "size": size})
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document == {
        "version": 1,
        "models": [
            {"name": "A", "mode": "training", "size": 3},
            {"name": "A", "mode": "inference", "size": 2},
        ],
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_a_place_nothing_is_written(path, monkeypatch):
    monkeypatch.setattr(place, "_owner", (os.getpid(), ""))
    assert not device_file.is_wanted()
    device_file.keep_model({"name": "A", "mode": "training"})
    assert not path.exists()


def test_what_is_no_json_leaves_the_file_as_it_was(path):
    device_file.keep_model({"name": "A", "mode": "training"})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        device_file.keep_model({"name": "B", "mode": "training", "size": object()})
    assert path.read_bytes() == before
    device_file.keep_model({"name": "C", "mode": "training"})
    assert [each["name"] for each in json.loads(path.read_bytes())["models"]] == ["A", "C"]
