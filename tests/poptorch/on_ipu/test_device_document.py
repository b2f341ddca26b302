"""The JSON file in the folder of a run with a compiled model's memory, schedule and time."""

from __future__ import annotations

import json
import os

import pytest
from poptorch.on_ipu.model_graphs import compile_as, model_graph
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.ipu.runs import device_document
from popdist_py.poptorch.on_ipu import published_figures
from popdist_py.run_files import device_file, place
from tools.device.ipu_graphs import mlp


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The JSON file that this process writes."""
    monkeypatch.setattr(place, "_owner", (os.getpid(), str(tmp_path / "instance-0")))
    monkeypatch.setattr(device_file, "_models", {})
    return tmp_path / "instance-0.device.json"


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))["models"]


def compile_mlp(change=lambda _: None):
    model, options = Mlp(), quiet_options()
    change(options)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    training.compile(*classified(2))
    return training


def test_a_compiled_model_has_the_name_of_the_users_class(path):
    trained = compile_mlp()
    poptorch.inferenceModel(trained.model, quiet_options())(classified(2)[0])
    assert [(each["name"], each["mode"]) for each in read(path)] == [
        ("Mlp", "training"),
        ("Mlp", "inference"),
    ]
    assert [each["device"]["is_named"] for each in read(path)] == [False, False]
    trained.destroy()
    compile_mlp(lambda options: options.Emulator.device("mk1"))
    devices = {each["mode"]: each["device"] for each in read(path)}
    assert devices["training"]["name"] == "mk1"
    assert devices["training"]["is_named"]


def test_other_instances_write_no_file(path):
    compile_mlp(lambda options: options.Distributed.configureProcessId(1, 2))
    assert not path.exists()


def test_without_a_folder_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(published_figures, "model_document", pytest.fail)
    assert compile_mlp().isCompiled()


def test_an_error_of_the_device_model_does_not_stop_the_program(path, monkeypatch):
    compile_as(monkeypatch, None)
    assert compile_mlp().isCompiled()
    compile_as(monkeypatch, model_graph(mlp([6, 8, 4], 2)))
    monkeypatch.setattr(device_document, "memory", lambda *_: 1 // 0)
    assert compile_mlp().isCompiled()
    assert not path.exists()


def test_a_full_disk_does_not_stop_the_program(path, monkeypatch):
    monkeypatch.setattr(place, "_owner", (os.getpid(), "/dev/null/instance-0"))
    assert compile_mlp().isCompiled()
