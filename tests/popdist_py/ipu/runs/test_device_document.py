"""The JSON document about a model on IPUs: figures equal to the reports, and a bounded size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.runs.device_document import model_document
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK1, MK2
from tools.device.ipu_graphs import mlp, resnet

GRAPH = mlp([512] * 5, 64)
TWO = Placement.cut(GRAPH, ["layers.2"])
PIPELINE = Run(GRAPH, TWO, Settings(accumulation=4), MK2)


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


def test_a_model_that_does_not_fit_has_its_problem_in_the_document():
    graph = resnet([3, 4, 6, 3], 224, 64)
    made = model_document(Run(graph, Placement.cut(graph), Settings(), MK1), "Net", is_named=False)
    (own,) = made["memory"]["ipus"]
    assert not made["memory"]["fits"]
    assert not own["fits"]
    assert own["fullest_tile"] > MK1.tile_bytes
