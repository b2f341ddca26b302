"""Whole programs of users: each model that they compile has a graph."""

from __future__ import annotations

import logging
import runpy
import sys

import pytest
from support.repository import ROOT

import popdist_py
import popdist_py.horovod.torch
from popdist_py import poptorch

PROGRAMS = ROOT / "tests" / "sdk_programs" / "recreated"


@pytest.mark.parametrize(
    ("program", "models"),
    [
        pytest.param("bert_metrics.py", 1, marks=pytest.mark.sweep),
        ("loops_and_slices.py", 5),
        pytest.param("schedules_and_state.py", 4, marks=pytest.mark.sweep),
    ],
)
def test_every_compiled_model_has_a_graph(program, models, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="poptorch::python")
    # The module names under which programs import the library.
    for name, module in (
        ("poptorch", poptorch),
        ("popdist", popdist_py),
        ("popdist.poptorch", popdist_py.poptorch),
        ("horovod", popdist_py.horovod),
        ("horovod.torch", popdist_py.horovod.torch),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(PROGRAMS / program), run_name="__main__")
    assert caplog.text.count("The model's forward has ") == models
    assert "forward could not be recorded" not in caplog.text
