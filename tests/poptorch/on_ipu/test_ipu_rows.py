"""Calls in the timeline: which calls are written, and when nothing is computed."""

from __future__ import annotations

import pytest
from support.models import quiet_options

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.poptorch.on_ipu import published_figures
from popdist_py.poptorch.on_ipu.published_figures import IpuRows
from popdist_py.timeline import spans
from tools.device.ipu_graphs import mlp

GRAPH = mlp([512] * 5, 64)


def pipeline(**settings) -> Run:
    placement = Placement.cut(GRAPH, ["layers.2"])
    return Run(GRAPH, placement, Settings(**{"accumulation": 4, **settings}), MK2)


@pytest.fixture
def drawn(monkeypatch):
    """Collects the spans that are added to a timeline."""
    found = []
    monkeypatch.setattr(spans, "is_recording", lambda: True)
    monkeypatch.setattr(spans, "add", lambda *span: found.append(span))
    return found


def test_the_first_calls_and_every_eighth_step_are_drawn(drawn):
    rows = IpuRows(pipeline())
    counts = []
    for step in range(100, 132):
        drawn.clear()
        rows.draw(1000, 2000, step)
        counts.append(len(drawn))
    steps = [step for step, count in zip(range(100, 132), counts, strict=True) if count]
    assert steps == [*range(100, 108), 112, 120, 128]
    drawn.clear()
    inference = IpuRows(pipeline(is_training=False, accumulation=1, device_iterations=2))
    for _ in range(16):
        inference.draw(0, 10, None)
    assert sum(span[:2] == ("IPU 0", "forward") for span in drawn) == 2 * (8 + 1)


def test_spans_lie_in_the_measured_call(drawn):
    IpuRows(pipeline()).draw(10_000, 20_000, 1)
    assert min(span[2] for span in drawn) == 10_000
    assert 19_900 < max(span[3] for span in drawn) <= 20_000


def test_nothing_is_computed_without_a_timeline(monkeypatch):
    monkeypatch.setattr(published_figures, "cycles_and_window", pytest.fail)
    IpuRows(pipeline()).draw(0, 1, 1)


def test_an_error_of_the_schedule_does_not_stop_the_program(drawn, monkeypatch):
    monkeypatch.setattr(published_figures, "cycles_and_window", lambda *_: 1 // 0)
    IpuRows(pipeline()).draw(0, 1, 1)
    assert drawn == []


def test_only_a_device_that_is_named_has_rows():
    assert IpuRows.of(pipeline(), quiet_options()) is None
    options = quiet_options()
    options.Emulator.device("mk2")
    assert IpuRows.of(None, options) is None
    assert IpuRows.of(pipeline(), options) is not None
