"""What the run's folder tells of a compiled model: the device's model's own figures, as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from poptorch.on_ipu.captures import capture_as, captured
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK1, MK2
from popdist_py.poptorch.on_ipu import device_document
from popdist_py.poptorch.on_ipu.device_document import model_document
from popdist_py.run_files import device_file, place
from tools.device.ipu_graphs import mlp, resnet

GRAPH = mlp([512] * 5, 64)
TWO = Placement.cut(GRAPH, ["layers.2"])
PIPELINE = Run(GRAPH, TWO, Settings(accumulation=4), MK2)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of this process."""
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


def test_a_document_has_the_figures_of_the_reports():
    made = json.loads(json.dumps(model_document(PIPELINE, "Net", is_named=True)))
    assert (made["name"], made["mode"], made["stages"]) == ("Net", "training", 2)
    assert made["device"] == {
        "name": "mk2", "is_named": True, "tiles": 1472, "tile_bytes": 638976, "clock": MK2.clock
    }  # fmt: skip
    assert made["memory"]["fits"]
    for number, own in enumerate(made["memory"]["ipus"]):
        assert own["ipu"] == number
        assert sum(own["by_category"].values()) == own["needed"] < own["capacity"]
        assert own["fits"] == (own["fullest_tile"] <= MK2.tile_bytes)
    shown = schedule(TWO, PIPELINE.settings)
    cells = [[[cell.action, cell.micro_batch, cell.stage] for cell in row] for row in shown.rows]
    assert made["schedule"]["rows"] == cells
    assert made["schedule"]["cycles"] == list(shown.cycles)
    assert made["schedule"]["svg"] == shown.svg()
    assert made["schedule"]["is_whole"]
    assert made["call"]["samples"] == 4 * 64
    assert made["call"]["seconds"] == pytest.approx(made["call"]["cycles"] / MK2.clock)


def test_a_long_schedule_is_cut():
    settings = replace(PIPELINE.settings, accumulation=1000)
    made = model_document(replace(PIPELINE, settings=settings), "Net", is_named=False)
    assert not made["schedule"]["is_whole"]
    assert {len(row) for row in made["schedule"]["rows"]} == {96}
    assert len(json.dumps(made)) < 200_000
    assert made["call"]["samples"] == 64_000


def test_a_model_that_does_not_fit_is_told_with_its_lack():
    graph = resnet([3, 4, 6, 3], 224, 64)
    made = model_document(Run(graph, Placement.cut(graph), Settings(), MK1), "Net", is_named=False)
    (own,) = made["memory"]["ipus"]
    assert not made["memory"]["fits"]
    assert not own["fits"]
    assert own["fullest_tile"] > MK1.tile_bytes


def test_compiling_leaves_it_under_the_name_of_the_users_class(path):
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


def test_another_instance_leaves_nothing(path):
    compile_mlp(lambda options: options.Distributed.configureProcessId(1, 2))
    assert not path.exists()


def test_without_a_place_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(device_document, "model_document", pytest.fail)
    assert compile_mlp().isCompiled()


def test_a_device_that_cannot_be_asked_ends_nothing(path, monkeypatch):
    capture_as(monkeypatch, None)
    assert compile_mlp().isCompiled()
    capture_as(monkeypatch, captured(mlp([6, 8, 4], 2)))
    monkeypatch.setattr(device_document, "memory", lambda *_: 1 // 0)
    assert compile_mlp().isCompiled()
    assert not path.exists()


def test_a_full_disk_ends_nothing(path, monkeypatch):
    monkeypatch.setattr(place, "_owner", (os.getpid(), "/dev/null/instance-0"))
    assert compile_mlp().isCompiled()
