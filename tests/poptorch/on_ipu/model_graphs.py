"""Graphs of models, made by hand, in place of those that compiling makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.poptorch.compilation import compiler


def model_graph(graph: Graph, before: Sequence[str] = ()) -> ModelGraph:
    """Return a graph with a stage on the next IPU before each of the modules."""
    return ModelGraph(graph, Placement.cut(graph, before))


def compile_as(monkeypatch, forward: ModelGraph | None) -> None:
    """Give every model that is compiled from now on the graph ``forward``."""
    trace = compiler._trace_with

    def traced(*args, **kwargs):
        return replace(trace(*args, **kwargs), model_graph=forward)

    monkeypatch.setattr(compiler, "_trace_with", traced)
