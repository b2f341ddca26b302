"""Captured forwards, made by hand, in place of what compiling captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from popdist_py.ipu.graph import Graph, Placement
from popdist_py.poptorch.compilation import compiler
from popdist_py.poptorch.on_ipu.captured import Captured


def captured(graph: Graph, before: Sequence[str] = ()) -> Captured:
    """Return a graph with a stage on the next IPU before each of the modules."""
    return Captured(graph, Placement.cut(graph, before))


def capture_as(monkeypatch, forward: Captured | None) -> None:
    """Have every model that is compiled from now on captured as ``forward``."""
    trace = compiler._trace_with

    def traced(*args, **kwargs):
        return replace(trace(*args, **kwargs), captured=forward)

    monkeypatch.setattr(compiler, "_trace_with", traced)
