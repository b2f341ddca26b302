"""With a named type of IPU, cycles, latencies and counters are those of the device model."""

from __future__ import annotations

import logging

import pytest
from poptorch.on_ipu.model_graphs import compile_as, model_graph
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.ipu.cycles import cycles
from popdist_py.poptorch.on_ipu.run_from_options import run_from_options
from tools.device.ipu_graphs import mlp

FORWARD = model_graph(mlp([6, 8, 4], 2))
EVENTS = ["input", "input_complete", "output", "output_complete"]


def ran(monkeypatch, name, change=lambda _: None):
    compile_as(monkeypatch, FORWARD)
    options = quiet_options().logCycleCount(True).deviceIterations(2)
    options.Training.gradientAccumulation(3)
    if name is not None:
        options.Emulator.device(name)
    change(options)
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    training.compile(*classified(12))
    return training, optimizer


@pytest.mark.parametrize("name", ["mk1", "mk2", "bow"])
def test_cycles_are_those_of_the_device_model(monkeypatch, name, caplog):
    training, optimizer = ran(monkeypatch, name)
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        training.cycleCount()
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        training(*classified(12))
        training(*classified(12))
    run = run_from_options(FORWARD, training.options, optimizer, training=True)
    assert training.cycleCount() == run.cycles
    assert f"Total number of IPU cycles: {run.cycles}" in caplog.text
    assert caplog.text.count(f"are estimates for {name.capitalize()} IPUs") == 1


def test_latencies_are_those_of_the_device_model(monkeypatch):
    training, optimizer = ran(monkeypatch, "mk2")
    assert training.getLatency() == (0, 0, 0)
    assert training.getPerfCounters() == {event: [[], []] for event in EVENTS}
    training(*classified(12))
    first = training.getPerfCounters(), training.getLatency(), training.getComputeLatency()
    training(*classified(12))
    # Modelled latencies do not vary between calls.
    assert first == (
        training.getPerfCounters(), training.getLatency(), training.getComputeLatency()
    )  # fmt: skip
    counters = training.getPerfCounters()
    assert [len(counters["input"]), len(counters["input"][0])] == [2, 6]
    assert len(counters["output"][0]) == 1
    run = run_from_options(FORWARD, training.options, optimizer, training=True)
    seconds = cycles(run.graph, run.placement, run.settings, run.ipu).seconds
    assert 0 == counters["input"][0][0] < counters["output_complete"][0][0] < seconds
    parts = (training.getHostIpuLatency, training.getComputeLatency, training.getIpuHostLatency)
    for low, high, mean in (part() for part in (*parts, training.getLatency)):
        assert 0 < low <= mean <= high
    means = [part()[2] for part in parts]
    assert training.getLatency()[2] == pytest.approx(sum(means))


def test_a_slower_device_is_slower(monkeypatch):
    latencies = []
    for name in ("mk1", "bow"):
        training, _ = ran(monkeypatch, name)
        training(*classified(12))
        latencies.append(training.getComputeLatency()[0])
    assert latencies[0] > latencies[1]


def test_synthetic_data_has_cycles_and_no_counters(monkeypatch):
    real, _ = ran(monkeypatch, "mk2")
    real(*classified(12))
    training, _ = ran(monkeypatch, "mk2", lambda o: o.enableSyntheticData(True))
    training(*classified(12))
    assert training.cycleCount() < real.cycleCount()
    assert training.getLatency() == (0, 0, 0)
    assert training.getPerfCounters()["input"] == [[], []]


def test_without_a_named_device_times_are_those_of_the_host(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "poptorch::python"):
        training, _ = ran(monkeypatch, None)
        training(*classified(12))
        first = training.getPerfCounters()
        training(*classified(12))
        assert training.getPerfCounters() != first
    assert "Cycles" not in caplog.text


def test_a_model_without_a_graph_has_times_of_the_host(monkeypatch, caplog):
    compile_as(monkeypatch, None)
    options = quiet_options().useIpuModel(True)
    with caplog.at_level(logging.INFO, "poptorch::python"):
        poptorch.inferenceModel(Mlp(), options)(classified(2)[0])
    assert "latencies are measured on this machine, because" in caplog.text


def test_only_instance_0_logs(monkeypatch, caplog):
    compile_as(monkeypatch, FORWARD)
    options = quiet_options().logCycleCount(True).useIpuModel(True)
    options.Distributed.configureProcessId(1, 2)
    inference = poptorch.inferenceModel(Mlp(), options)
    with caplog.at_level(logging.INFO, "poptorch::python"):
        inference(classified(2)[0])
    assert inference.cycleCount() > 0
    assert caplog.text == ""


def test_another_optimizer_changes_the_cycles(monkeypatch):
    training, _ = ran(monkeypatch, "mk2")
    training(*classified(12))
    before = training.cycleCount()
    training.setOptimizer(poptorch.optim.Adam(training.model.parameters(), lr=0.1))
    training(*classified(12))
    assert training.cycleCount() > before


def test_every_nth_output_has_its_times(monkeypatch):
    every = poptorch.OutputMode.EveryN
    training, _ = ran(monkeypatch, "mk2", lambda options: options.outputMode(every, 2))
    training(*classified(12))
    assert training.cycleCount() > 0
    assert [len(times[0]) for times in training.getPerfCounters().values()] == [6, 6, 3, 3]
    assert "Execution" in str(training.executionReport())
