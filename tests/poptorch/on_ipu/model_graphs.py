"""Graphs made by hand, which replace the graphs that a compilation makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.poptorch.compilation import compiler


def model_graph(graph: Graph, before: Sequence[str] = ()) -> ModelGraph:
    """Return a graph in which a stage on the next IPU begins before each of the modules."""
    return ModelGraph(graph, Placement.cut(graph, before))


def compile_as(monkeypatch, forward: ModelGraph | None) -> None:
    """Give the graph ``forward`` to every model that is compiled later."""
    trace = compiler._trace_with

    def traced(*args, **kwargs):
        return replace(trace(*args, **kwargs), model_graph=forward)

    monkeypatch.setattr(compiler, "_trace_with", traced)
