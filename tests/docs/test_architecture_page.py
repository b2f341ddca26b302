"""The picture and the table of docs/architecture.md are what the code makes of them now."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from support.repository import ROOT


@pytest.fixture
def architecture(monkeypatch):
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "docs" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the module of a class.
    monkeypatch.setitem(sys.modules, "architecture", module)
    spec.loader.exec_module(module)
    return module


def test_the_house_is_drawn_as_it_stands(architecture):
    for path, text in architecture.files().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is old: python docs/architecture.py"
        )


def test_arrows_that_follow_from_others_are_not_drawn(architecture):
    arrows = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    arrows = {node: frozenset(others) for node, others in arrows.items()}
    assert architecture.reduced(arrows) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert architecture.rows_of(arrows) == [["a"], ["b"], ["c"]]
