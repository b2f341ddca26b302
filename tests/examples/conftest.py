"""Fixtures of the tests of the examples."""

import runpy
import sys

import pytest
from examples.forks import forks
from support.processes import remove_surroundings
from support.repository import ROOT


@pytest.fixture(scope="module")
def processes():
    """Run programs in processes that are forked from one with torch."""
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        with forks(ROOT) as found:
            yield found


@pytest.fixture
def program(monkeypatch):
    """Return a function that reads a program's file, and gives what is defined there."""
    folder = ROOT / "examples"

    def read(name):
        path = folder / name
        monkeypatch.syspath_prepend(str(path.parent))
        before = set(sys.modules)
        monkeypatch.setattr(sys, "argv", [str(path)])
        found = runpy.run_path(str(path), run_name="read")
        for module in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
                monkeypatch.delitem(sys.modules, module)
        return found

    return read
