"""Times and cycles of a run."""

from __future__ import annotations

import logging

import pytest
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch


@pytest.mark.parametrize(
    ("mode", "returned"),
    [
        (poptorch.OutputMode.All, 12),
        (poptorch.OutputMode.Final, 2),
        (poptorch.OutputMode.Sum, 2),
        (poptorch.OutputMode.EveryN, 4),
    ],
)
def test_counters(mode, returned):
    options = (
        quiet_options()
        .deviceIterations(3)
        .replicationFactor(2)
        .outputMode(mode, 3 if mode == poptorch.OutputMode.EveryN else None)
    )
    options.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(Mlp(), options)
    events = ["input", "input_complete", "output", "output_complete"]
    assert training.getPerfCounters() == {event: [[]] for event in events}
    assert training.getLatency() == (0, 0, 0)
    training(*classified(12))
    counters = training.getPerfCounters()
    assert [len(counters[event]) for event in events] == [2, 2, 2, 2]
    assert {len(steps) for steps in counters["input"]} == {12}
    assert {len(steps) for steps in counters["output"]} == {returned}
    for tensors in counters.values():
        assert all(steps == sorted(steps) for steps in tensors)
    if mode == poptorch.OutputMode.All:
        rows = zip(*(counters[event][0] for event in events), strict=True)
        assert all(list(row) == sorted(row) for row in rows)
    for latency in (
        training.getHostIpuLatency(),
        training.getComputeLatency(),
        training.getIpuHostLatency(),
        training.getLatency(),
    ):
        low, high, mean = latency
        assert 0 < low <= mean <= high


def test_synthetic_data_has_no_counters():
    inference = poptorch.inferenceModel(Mlp(), quiet_options().enableSyntheticData(True))
    inference(classified(2)[0])
    assert inference.getPerfCounters()["input"] == [[]]
    assert inference.getLatency() == (0, 0, 0)


def test_cycles(caplog):
    x, _ = classified(2)
    off = poptorch.inferenceModel(Mlp(), quiet_options())
    off(x)
    with pytest.raises(poptorch.Error, match=r"disabled.*logCycleCount"):
        off.cycleCount()
    on = poptorch.inferenceModel(Mlp(), quiet_options().logCycleCount(True))
    on.compile(x)
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        on.cycleCount()
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        on(x)
    assert on.cycleCount() > 0
    assert f"Total number of IPU cycles: {on.cycleCount()}" in caplog.text
