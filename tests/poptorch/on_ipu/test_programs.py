"""Whole programs of users: every model that they compile is captured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.repository import ROOT

PROGRAMS = ROOT / "tests" / "sdk_programs" / "recreated"


@pytest.mark.parametrize(
    ("program", "models"),
    [
        pytest.param("bert_metrics.py", 1, marks=pytest.mark.sweep),
        ("loops_and_slices.py", 5),
        pytest.param("schedules_and_state.py", 4, marks=pytest.mark.sweep),
    ],
)
def test_every_model_is_captured(program, models, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "POPTORCH_LOG_LEVEL": "DEBUG"}
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py", PROGRAMS / program],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert told.count("The forward is captured") == models
    assert "not captured" not in told
