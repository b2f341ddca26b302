"""Reports of a PopTorch model about memory and time, before and after compilation."""

from __future__ import annotations

import pytest
from poptorch.on_ipu.model_graphs import compile_as, model_graph
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.ipu.reports import ExecutionPage, MemoryPage
from popdist_py.ipu.schedule import Schedule
from popdist_py.poptorch.model import device_reports
from tools.device.ipu_graphs import mlp, resnet

FORWARD = model_graph(mlp([6, 8, 4], 2))
LARGER = model_graph(resnet([3, 4, 6, 3], 64, 4), ["layer3.0"])


def training(options=None):
    model = Mlp()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    options = options or quiet_options()
    options.Training.gradientAccumulation(4)
    return poptorch.trainingModel(model, options, optimizer)


@pytest.fixture
def compiled(monkeypatch):
    compile_as(monkeypatch, FORWARD)
    model = training()
    model.compile(*classified(8))
    return model


def test_a_compiled_model_needs_no_arguments(compiled):
    assert isinstance(compiled.memoryReport(), MemoryPage)
    assert isinstance(compiled.executionReport(), ExecutionPage)
    assert isinstance(compiled.schedule(), Schedule)


def test_reports_are_text_and_json(compiled):
    for report, version in ((compiled.memoryReport(), 2), (compiled.executionReport(), 1)):
        assert str(report)
        assert report.to_json()["version"] == version


def test_a_schedule_is_text_and_a_picture(compiled):
    assert str(compiled.schedule()) == (
        "     1  2  3  4  5  6  7  8  9\nIPU0 F1 B1 F2 B2 F3 B3 F4 B4 U"
    )
    assert str(compiled.schedule(steps=2)) == "     1  2\nIPU0 F1 B1"
    assert compiled.schedule()._repr_html_() == compiled.schedule().svg()
    assert compiled.schedule().svg().startswith("<svg ")


def test_arguments_ask_about_another_call(compiled, monkeypatch):
    asked = []

    def graph_of_model(model, options, args, kwargs, *, training):
        asked.append((type(model), options, [len(t) for t in (*args, *kwargs.values())], training))
        return LARGER

    monkeypatch.setattr(device_reports, "graph_of_model", graph_of_model)
    assert compiled.schedule(*classified(16)).rows != compiled.schedule().rows
    assert asked == [(Mlp, compiled.options, [16, 16], True)]
    model = training()
    x, y = classified(8)
    assert len(model.schedule(x, y=y, steps=3).rows) == 2
    assert str(model.memoryReport(x, y)) == str(compiled.memoryReport(x, y))
    assert not model.isCompiled()


def test_inference_has_no_backward(monkeypatch):
    compile_as(monkeypatch, FORWARD)
    inference = poptorch.inferenceModel(Mlp(), quiet_options().deviceIterations(2))
    inference.compile(classified(4)[0])
    assert str(inference.schedule()).endswith("IPU0 F1 F2")


def test_a_report_before_compilation_needs_arguments():
    for ask in (training().schedule, training().memoryReport, training().executionReport):
        with pytest.raises(poptorch.Error, match=r"not compiled.*pass arguments"):
            ask()


def test_a_model_without_a_graph(monkeypatch):
    compile_as(monkeypatch, None)
    model = training()
    model.compile(*classified(8))
    with pytest.raises(poptorch.Error, match="without a graph"):
        model.memoryReport()


def test_the_device_is_the_one_named(monkeypatch):
    compile_as(monkeypatch, FORWARD)
    options = quiet_options()
    options.Emulator.device("mk1")
    small = training(options)
    small.compile(*classified(8))
    large = training()
    large.compile(*classified(8))
    assert str(small.memoryReport()) != str(large.memoryReport())


def test_a_report_about_a_model_that_does_not_fit_has_advice(monkeypatch):
    compile_as(monkeypatch, model_graph(resnet([3, 4, 23, 3], 64, 64)))
    options = quiet_options()
    options.setExecutionStrategy(poptorch.ShardedExecution())
    model = training(options)
    model.compile(*classified(8))
    page = model.memoryReport()
    assert "partials in float16: options.Precision.setPartialsType(torch.half)" in str(page)
    assert all(advice["how"] for advice in page.to_json()["advice"])
