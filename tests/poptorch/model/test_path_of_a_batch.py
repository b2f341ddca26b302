"""The modules that a batch passes in a call, as the page about the architecture lists them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch

_PACKAGE = Path(poptorch.__file__).parent
_PAGE = _PACKAGE.parents[1] / "docs" / "architecture.md"
# The data loader has joined the batch before the call.
_BEFORE_THE_CALL = "data/dataloader"


def _rows() -> list[list[str]]:
    """Return the modules in each row of the table about a call."""
    section = _PAGE.read_text().partition("**Each call**")[2].partition("## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return [re.findall(r"`(.+?)`", cell) for cell in cells]


def _modules_of_a_call(back_end: str) -> set[str]:
    options = quiet_options().replicationFactor(2)
    options.Training.gradientAccumulation(2)
    options.Emulator.replicaExecution(back_end)
    module = Mlp()
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    batch = classified(8)
    model(*batch)
    visited: set[str] = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_PACKAGE):
            visited.add(str(path.relative_to(_PACKAGE).with_suffix("")))

    sys.setprofile(note)
    try:
        model(*batch)
    finally:
        sys.setprofile(None)
    return visited


@pytest.mark.parametrize(
    ("back_end", "runner"),
    [
        ("loop", "execution/replicas"),
        ("auto", "execution/replica_graphs/graph_replicas"),
    ],
)
def test_a_call_passes_the_modules_of_the_page(back_end: str, runner: str):
    visited = _modules_of_a_call(back_end)
    for row in _rows():
        if row != [_BEFORE_THE_CALL]:
            (module,) = [name for name in row if len(row) == 1 or name == runner]
            assert module in visited


def test_the_page_lists_at_most_twelve_steps():
    assert 8 <= len(_rows()) <= 12
