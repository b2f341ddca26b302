"""The figures of docs/device.md are what the model of the device makes of them now."""

from __future__ import annotations

import importlib.util

import pytest
from support.repository import ROOT


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_figures_are_those_of_the_model():
    spec = importlib.util.spec_from_file_location("device_page", ROOT / "docs" / "device.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.text() == page.PAGE.read_text(encoding="utf-8"), "old: python docs/device.py"
