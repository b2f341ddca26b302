"""Compilation of a model that does not fit into the memory of its IPUs: errors and warnings."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
from poptorch.on_ipu.model_graphs import compile_as, model_graph
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.ipu.memory import memory
from popdist_py.ipu.searches import run as run_module
from popdist_py.ipu.settings import SGD, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.what_if import Advice
from popdist_py.poptorch.on_ipu import memory_check
from tools.device.ipu_graphs import mlp, resnet

LARGE = model_graph(resnet([3, 4, 6, 3], 224, 64), ["layer3.0"])
SMALL = model_graph(mlp([6, 8, 4], 2))


@pytest.fixture(autouse=True)
def _nothing_is_warned_of_yet(monkeypatch):
    monkeypatch.setattr(memory_check, "_warned", set())


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, logger="poptorch::python")
    return caplog


def compiled(monkeypatch, forward, change=lambda _: None):
    compile_as(monkeypatch, forward)
    options = quiet_options()
    change(options)
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    training.compile(*classified(2))
    return training


def pipelined(options):
    """Set an execution strategy that needs no minimum of micro-batches."""
    options.setExecutionStrategy(poptorch.ShardedExecution())


def test_a_model_that_does_not_fit_is_an_error(monkeypatch, log):
    def change(options):
        pipelined(options)
        options.Emulator.device("mk2")

    with pytest.raises(poptorch.Error) as raised:
        compiled(monkeypatch, LARGE, change)
    assert raised.value.type == "poplar_graph_memory_allocation_error"
    lines = raised.value.message.splitlines()
    assert lines[0].startswith("Out of memory on IPU ")
    largest = lines.index("Largest contributions:") + 1
    helping = lines.index("Changes that would save memory, each alone:") + 1
    assert helping - largest == 5 + 1
    assert any("layer" in line for line in lines[largest:helping])
    together = lines.index("Changes that together make the model fit:")
    saving = lines[helping:together:2]
    assert all(float(line.split()[0].replace(",", "")) >= 0 for line in saving)
    assert all(
        re.search(r"less, (equally fast|\d+\.\d% (slower|faster)) ", line) for line in saving
    )
    assert len(saving) > 3
    # Below each change, a line has the option that the program sets for it.
    assert "      change batch_size of poptorch.DataLoader" in lines[helping + 1 : together : 2]
    # The last line of the error says how to run the model anyway.
    assert "POPDIST_IPU_MEMORY=warn" in lines[-1]
    assert 'Options.Emulator.memory("warn")' in lines[-1]
    assert log.records == []


@pytest.mark.parametrize("mode", ["enforce", "warn"])
def test_close_to_the_limit_is_a_warning_and_no_error(monkeypatch, log, mode):
    graph = SMALL.graph
    full = memory(graph, SMALL.placement, Settings(optimizer=SGD), MK2).fullest.fullest_tile

    def sized(share):
        tiny = replace(MK2, name="tiny", tile_bytes=round(full / share))
        return lambda options: options.Emulator.device(tiny).memory(mode)

    for _ in range(2):
        assert compiled(monkeypatch, SMALL, sized(1.03)).isCompiled()
    (record,) = log.records
    line = record.getMessage()
    assert line.startswith(f"Close to the limit on IPU 0: the fullest tile uses {full:,} of")
    assert "(103.0% +- 5%)." in line
    assert "may or may not fit" in line
    assert "turns this warning into an error" not in line
    if mode == "enforce":
        with pytest.raises(poptorch.Error, match="Out of memory on IPU 0"):
            compiled(monkeypatch, SMALL, sized(1.06))


def test_a_smaller_model_compiles_after_the_error(monkeypatch):
    with pytest.raises(poptorch.Error):
        compiled(monkeypatch, LARGE, lambda o: o.Emulator.device("mk1"))
    assert compiled(monkeypatch, SMALL, lambda o: o.Emulator.device("mk1")).isCompiled()


def test_without_a_named_device_one_warning_is_logged(monkeypatch, log):
    for _ in range(2):
        training = compiled(monkeypatch, LARGE, pipelined)
        training(*classified(2))
    (record,) = log.records
    line = record.getMessage()
    assert line.startswith("Out of memory on IPU ")
    assert " are for Mk2 IPUs. " in line
    assert "This change saves " in line
    assert "model.memoryReport()" in line
    assert "POPDIST_IPU_MEMORY=enforce or --ipu-model mk2 turns this warning into an error" in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "change", "expected"),
    [
        ({"POPDIST_IPU_MEMORY": "warn"}, None, "POPDIST_IPU_MEMORY=enforce or --ipu-model mk2"),
        ({"POPDIST_IPU_MEMORY": "warn", "POPDIST_IPU": "bow"}, None, "POPDIST_IPU_MEMORY=enforce"),
        ({}, lambda o: o.Emulator.memory("warn"), 'Options.Emulator.memory("enforce")'),
        (
            {"POPDIST_IPU_MEMORY": "enforce"},
            lambda o: o.Emulator.memory("warn"),
            'Options.Emulator.memory("enforce")',
        ),
    ],
)
def test_the_warning_names_the_setting_that_enforces(monkeypatch, log, variables, change, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def changed(options):
        pipelined(options)
        if change is not None:
            change(options)

    compiled(monkeypatch, LARGE, changed)
    assert f"anyway. {expected} turns this warning into an error" in log.text


def test_weights_that_are_too_large_need_no_graph(monkeypatch, log):
    tiny = replace(MK2, name="tiny", tiles=1, tile_bytes=16)
    compiled(monkeypatch, None, lambda o: o.Emulator.device(tiny).memory("warn"))
    (record,) = log.records
    line = record.getMessage()
    lacking = "the model's weights and buffers alone need 368 bytes but 1 IPU only has 16 bytes."
    assert line.startswith(f"Out of memory: {lacking} ")
    assert "memoryReport" not in line  # ``memoryReport`` would fail for this model
    with pytest.raises(poptorch.Error, match=lacking) as raised:
        compiled(monkeypatch, None, lambda o: o.Emulator.device(tiny))
    assert raised.value.type == "poplar_graph_memory_allocation_error"


def test_weights_off_the_chip_are_not_counted(monkeypatch, log):
    def off_chip(options):
        away = poptorch.TensorLocationSettings().useOnChipStorage(False)
        options.TensorLocations.setWeightLocation(away)
        options.Emulator.device(replace(MK2, name="tiny", tiles=1, tile_bytes=16)).memory("warn")

    assert compiled(monkeypatch, None, off_chip).isCompiled()
    assert log.records == []


def test_the_warning_has_an_advice_that_is_enough(monkeypatch, log):
    explain = memory_check.explain
    much = Advice("much", 10**9, fits=False, kind="half training")
    enough = Advice("enough", 10**8, fits=True, kind="half partials")
    monkeypatch.setattr(
        memory_check, "explain", lambda run: replace(explain(run), advice=(much, enough))
    )
    compiled(monkeypatch, LARGE, pipelined)
    how = "options.Precision.setPartialsType(torch.half)"
    said = f"saves 100.0 MB, so that the model fits: enough ({how})"
    assert said in log.text
    assert "much" not in log.text


def test_only_instance_0_warns(monkeypatch, log):
    compile_as(monkeypatch, model_graph(resnet([3, 4, 6, 3], 224, 256)))
    options = quiet_options()
    options.Distributed.configureProcessId(1, 2)
    poptorch.inferenceModel(Mlp(), options).compile(classified(2)[0])
    assert log.records == []


def test_all_instances_raise_the_error(monkeypatch):
    compile_as(monkeypatch, model_graph(resnet([3, 4, 6, 3], 224, 256)))
    options = quiet_options()
    options.Distributed.configureProcessId(1, 2)
    options.Emulator.device("mk2")
    with pytest.raises(poptorch.Error, match="Out of memory"):
        poptorch.inferenceModel(Mlp(), options).compile(classified(2)[0])


@pytest.mark.parametrize("forward", [LARGE, SMALL, None])
def test_the_mode_off_checks_nothing(monkeypatch, log, forward):
    monkeypatch.setattr(memory_check, "explain", None)
    assert compiled(monkeypatch, forward, lambda o: o.Emulator.memory("off")).isCompiled()
    assert log.records == []


def test_a_model_that_fits_has_no_warning(monkeypatch, log):
    compiled(monkeypatch, SMALL)
    assert compiled(monkeypatch, SMALL, lambda o: o.Emulator.device("mk1")).isCompiled()
    assert log.records == []


def unanswerable(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("forward", [SMALL, None])
def test_a_failed_estimate_is_logged_if_the_check_enforces(monkeypatch, log, forward):
    monkeypatch.setattr(run_module, "memory", unanswerable)
    assert compiled(monkeypatch, forward).isCompiled()
    assert log.records == []
    assert compiled(monkeypatch, forward, lambda o: o.Emulator.device("mk1")).isCompiled()
    (record,) = log.records
    assert record.getMessage().startswith("The memory that this model needs on Mk1 IPUs cannot")
    assert "runs the model anyway" in record.getMessage()


def test_missing_memory_is_reported_without_advice_too(monkeypatch, log):
    monkeypatch.setattr(memory_check, "explain", unanswerable)
    compiled(monkeypatch, LARGE, pipelined)
    assert "Out of memory on IPU " in log.text
    with pytest.raises(poptorch.Error, match="Out of memory on IPU "):
        compiled(monkeypatch, LARGE, lambda o: o.Emulator.device("mk1"))


def test_an_option_that_only_the_device_model_rejects_stops_no_emulation(monkeypatch, log):
    def odd(options):
        # The real IPU has pairs of tiles, but the emulation accepts odd numbers of I/O tiles.
        options.TensorLocations.createOrSet(numIOTiles=33)

    assert compiled(monkeypatch, SMALL, odd).isCompiled()
    assert log.records == []


def test_executables_from_a_cache_are_checked_too(monkeypatch, log, tmp_path):
    def change(options):
        pipelined(options)
        options.enableExecutableCaching(str(tmp_path))

    compiled(monkeypatch, LARGE, change)
    assert len(log.records) == 1
    memory_check._warned.clear()
    # The stored executable contains the graph, so the forward pass is not traced again.
    compiled(monkeypatch, None, change)
    assert len(log.records) == 2
