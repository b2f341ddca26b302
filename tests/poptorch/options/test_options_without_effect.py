"""Every option does something, or says that it does not: no silent nothing among the setters."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
import torch
from support.models import Mlp, classified, quiet_options
from support.repository import ROOT
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch import old_spellings
from popdist_py.poptorch.options import options_without_effect
from popdist_py.poptorch.options.option_effects import STORED
from popdist_py.poptorch.options.store import OptionStore

# Setters that change what a model does: tests of these models see it.
_EFFECTS = {
    row.name if "." in row.name else f"Options.{row.name}" for row in STORED.values() if row.acts
} | {
    # Their values are session options and engine options, or a default of the device.
    "Options.enableExecutableCaching",
    "Options.enableProfiling",
    "Options.enableSyntheticData",
    "Options.logCycleCount",
    "Options.updatableNamedBuffers",
    "Options.useOfflineIpuTarget",
    "Precision.enableFloatingPointExceptions",
    "Precision.enableStochasticRounding",
    "Precision.setPartialsType",
    "Training.setAutomaticLossScaling",
    "_Popart.setEngineOptions",
}
# Setters with an effect for some of their values only, which other tests show.
_EFFECTS -= {
    "Distributed.configureProcessId",
    "Options.useIpuModel",
    "Training.setMeanAccumulationAndReplicationReductionStrategy",
}
# What sets other options, or one that all setters of the group share; test_options.py has them.
_NO_OPTIONS = {
    "Options.batching",
    "Options.check_ipus",
    "Options.clone",
    "Options.defaultOutputMode",
    "Options.from_json",
    "Options.loadFromFile",
    "Options.overlap_conditions",
    "Options.resolved_output_mode",
    "Distributed.configureProcessId",
    "Distributed.disable",
    "Distributed.setEnvVarNames",
    "_Popart.changed_rows",
    "_Popart.check",
    "_Popart.engine_value",
    "_Popart.is_engine_option_on",
    "_Popart.session_member",
    "_Popart.session_value",
    "_Popart.set",
    "_Popart.update",
}
# Every strategy computes the same mean, so no warning is logged. An optimiser that needs one of the
# strategies raises an error for the others.
_RIGHT_ANYWAY = {"Training.setMeanAccumulationAndReplicationReductionStrategy"}
_DEPRECATED = {
    "Jit.traceModel": lambda o: o.Jit.traceModel(False),
    "Precision.halfFloatCasting": lambda o: o.Precision.halfFloatCasting(None),
    "Precision.runningStatisticsAlwaysFloat": lambda o: o.Precision.runningStatisticsAlwaysFloat(
        True
    ),
}
# What is said aloud, and how.
_SAID = {
    "Options.logDir": (
        lambda o: o.logDir("logs"),
        "logDir (the emulation does not write log files)",
    ),
    "Options.maxRepeatLogs": (
        lambda o: o.maxRepeatLogs(2),
        "maxRepeatLogs (the log shows all repeated lines",
    ),
    "Options.useIpuModel": (
        lambda o: o.useIpuModel(False),
        "useIpuModel(False) (the emulation cannot",
    ),
    "a session option that promises a file": (
        lambda o: o._Popart.set("exportPoplarVertexGraph", "graph"),
        "_Popart exportPoplarVertexGraph (the emulation does not write this file)",
    ),
    "an unknown engine option": (
        lambda o: o._Popart.setEngineOptions({"opt.enableMultiAccesCopies": "false"}),
        "engine option opt.enableMultiAccesCopies (an unknown key: did you mean "
        "opt.enableMultiAccessCopies?)",
    ),
    "an engine option like no other": (
        lambda o: o._Popart.setEngineOptions({"zzz": "1"}),
        "engine option zzz (an unknown key)",
    ),
    "a session option that a setter has": (
        lambda o: o._Popart.set("accumulationFactor", 4),
        "_Popart accumulationFactor (use a setter of poptorch.Options instead)",
    ),
}
# Options of phases without effect: the model of the device moves their tensors in one way only.
_SAID |= {
    name: (choose, text)
    for name, choose, text in (
        (
            "separate backward phases",
            lambda o: o.setExecutionStrategy(
                poptorch.SerialPhasedExecution("a").useSeparateBackwardPhase()
            ),
            "useSeparateBackwardPhase (the emulation always runs",
        ),
        (
            "liveness of phases",
            lambda o: o.setExecutionStrategy(
                poptorch.SerialPhasedExecution("a").setTensorsLiveness(
                    poptorch.Liveness.OffChipAfterFwd
                )
            ),
            "setTensorsLiveness (in the emulation, each phase loads",
        ),
        (
            "parallel phases whose tensors leave",
            lambda o: o.setExecutionStrategy(
                poptorch.ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd()
            ),
            "sendTensorsOffChipAfterFwd (in the emulation, each phase loads",
        ),
        (
            "I/O tiles for tensors",
            lambda o: o.TensorLocations.setWeightLocation(
                poptorch.TensorLocationSettings().useIOTilesToLoad()
            ),
            "TensorLocationSettings.useIOTilesToLoad (emulated I/O tiles",
        ),
    )
}
# What only hardware can do better or worse.
_HARDWARE = {
    "Options.appendToLocationExcludes": (
        lambda o: o.appendToLocationExcludes("a"),
        "sourceLocationExcludes",
    ),
    "Options.sourceLocationExcludes": (
        lambda o: o.sourceLocationExcludes(["a"]),
        "sourceLocationExcludes",
    ),
    "Options.enableStableNorm": (lambda o: o.enableStableNorm(True), "enableStableNorm"),
    "Options.modelName": (lambda o: o.modelName("mine"), "modelName"),
    "Options.syncPattern": (
        lambda o: o.syncPattern(poptorch.SyncPattern.SinglePipeline),
        "syncPattern",
    ),
    "Training.setConvolutionDithering": (
        lambda o: o.Training.setConvolutionDithering(True),
        "Training.setConvolutionDithering",
    ),
    "_Popart.setPatterns": (lambda o: o._Popart.setPatterns({"a": True}), "_Popart.setPatterns"),
    "any session option": (
        lambda o: o._Popart.set("outlineThreshold", 1.0),
        "_Popart outlineThreshold",
    ),
    "an option of convolutions": (
        lambda o: o._Popart.set("convolutionOptions", {"partialsType": "half", "pass": "FC"}),
        "_Popart convolutionOptions pass",
    ),
    "an option of matrix products": (
        lambda o: o._Popart.set(
            "matmulOptions", {"availableMemoryProportion": "0.1", "use128BitConvUnitLoad": "true"}
        ),
        "_Popart matmulOptions use128BitConvUnitLoad",
    ),
    **{
        f"engine option {name}": (
            lambda o, name=name: o._Popart.setEngineOptions({name: "1"}),
            f"engine option {name}",
        )
        for name in ("target.hostSyncTimeout", "opt.enableMultiAccessCopies", "prng.seed")
    },
}


def setters():
    """Every public method of the options and their groups, as Group.name."""
    whole = poptorch.Options()
    for group, store in {"Options": whole, **whole._groups()}.items():
        for name, _ in inspect.getmembers(type(store), inspect.isfunction):
            shared = getattr(OptionStore, name, None) is getattr(type(store), name)
            if not name.startswith("_") and not shared and name != "toDict":
                yield f"{group}.{name}"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(options_without_effect, "_said", set())


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    return caplog


def compiled(options):
    options.showCompilationProgressBar(False)
    poptorch.inferenceModel(nn.Linear(2, 2), options).compile(torch.ones(1, 2))


def texts(log, level):
    return [r.getMessage() for r in log.records if r.levelno == level]


def test_effects_that_no_other_test_looks_at(log, capsys):
    model = Mlp()
    for relaxed in (True, False):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        options = quiet_options().relaxOptimizerAttributesChecks(relaxed)
        training = poptorch.trainingModel(model, options, optimizer)
        training.compile(*classified(2))
        optimizer.surprise = 1
        training.setOptimizer(optimizer)
        assert ("unexpected optimizer attribute" in log.text) is not relaxed
        training.destroy()
    assert "Graph compilation" not in capsys.readouterr().err
    options = poptorch.Options().showCompilationProgressBar(True)
    poptorch.inferenceModel(nn.Linear(2, 2), options).compile(torch.ones(1, 2))
    assert "Graph compilation" in capsys.readouterr().err
    for kind, attached in (
        (poptorch.ConnectionType.Always, True),
        (poptorch.ConnectionType.Never, False),
    ):
        inference = poptorch.inferenceModel(nn.Linear(2, 2), quiet_options().connectionType(kind))
        inference.compile(torch.ones(1, 2))
        assert inference.isAttachedToDevice() is attached


def test_every_setter_is_known():
    said = {*_SAID, *_HARDWARE, *_DEPRECATED}
    groups = [_EFFECTS, _NO_OPTIONS, _RIGHT_ANYWAY, {n for n in said if "." in n and " " not in n}]
    known = set().union(*groups)
    assert sum(map(len, groups)) == len(known), "a setter has one kind"
    assert set(setters()) == known


def test_every_setter_that_acts_is_in_the_test_of_a_model():
    folder = ROOT / "tests" / "poptorch"
    files = [path for path in folder.rglob("test_*.py") if path.name != "test_options.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in sorted(_EFFECTS) if f".{name.split('.')[1]}(" not in text] == []


@pytest.mark.parametrize("what", _SAID)
def test_what_is_missing_is_said_once(what, log):
    choose, text = _SAID[what]
    options = poptorch.Options()
    choose(options)
    for _ in range(2):
        compiled(options.clone())
    (line,) = texts(log, logging.WARNING)
    assert line.startswith("These options do nothing on emulated IPUs: ")
    assert text in line


@pytest.mark.parametrize("what", _HARDWARE)
def test_what_only_hardware_has_is_said_once(what, log):
    choose, text = _HARDWARE[what]
    options = poptorch.Options()
    choose(options)
    for _ in range(2):
        compiled(options.clone())
    assert texts(log, logging.WARNING) == [
        f"These options change only the speed or memory of real IPUs, not of emulated IPUs: {text}"
    ]


@pytest.mark.parametrize("what", _DEPRECATED)
def test_what_is_deprecated_says_so_at_once(what, log, monkeypatch):
    monkeypatch.setattr(old_spellings, "_said", set())
    _DEPRECATED[what](poptorch.Options())
    assert len(texts(log, logging.WARNING)) == 1


def test_all_of_them_make_one_line(log):
    options = poptorch.Options()
    for what, (choose, _) in _SAID.items():
        if "engine" not in what:  # they replace each other
            choose(options)
    compiled(options)
    (line,) = texts(log, logging.WARNING)
    # Two are engine options, and the last of three execution strategies counts.
    assert line.count(" (") == len(_SAID) - 4


def test_options_as_they_are_say_nothing(log):
    options = quiet_options().logDir(".").setAvailableMemoryProportion({"IPU0": 0.5})
    options.Precision.enableStochasticRounding(True)
    options.Precision.setPartialsType(torch.half)
    options.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings())
    options._Popart.set("autoRecomputation", 3).set("enablePipelining", True)
    options.Training.setAutomaticLossScaling(True)
    options.enableSyntheticData(True).logCycleCount(True).updatableNamedBuffers([])
    options._Popart.setEngineOptions({"autoReport.all": "false"})
    compiled(options)
    assert log.records == []


def test_memory_proportions_of_ipus_that_a_model_does_not_use(log):
    compiled(quiet_options().setAvailableMemoryProportion({"IPU0": 0.5, "IPU1": 0.4, "IPU3": 0.1}))
    (line,) = texts(log, logging.WARNING)
    assert line == (
        "setAvailableMemoryProportion() names IPU1, IPU3, but the model uses only 1 IPU, "
        "numbered from IPU0"
    )


def test_only_instance_0_speaks(log):
    options = poptorch.Options().logDir("logs")
    options.Distributed.configureProcessId(1, 2)
    compiled(options)
    assert log.records == []


def test_training_models_say_it_too(log):
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, quiet_options().logDir("logs"), optimizer).compile(*classified(2))
    assert len(texts(log, logging.WARNING)) == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("POPLAR_ENGINE_OPTIONS", '{"opt.enableMultiAccessCopies": "false", "prng.seed": "1"}',
         "not of emulated IPUs: opt.enableMultiAccessCopies of POPLAR_ENGINE_OPTIONS, prng.seed of "
         "POPLAR_ENGINE_OPTIONS"),
        ("POPLAR_ENGINE_OPTIONS", '{"target.hostSyncTimeOut": "3000"}',
         "IPUs: target.hostSyncTimeOut of POPLAR_ENGINE_OPTIONS (an unknown key: did you mean "
         "target.hostSyncTimeout?)"),
        ("POPLAR_RUNTIME_OPTIONS", "{}", "not of emulated IPUs: POPLAR_RUNTIME_OPTIONS"),
        ("POPLAR_LOG_LEVEL", "DEBUG", "IPUs: POPLAR_LOG_LEVEL (use POPTORCH_LOG_LEVEL to set"),
        ("TF_POPLAR_FLAGS", "--executable_cache_path=here", "IPUs: TF_POPLAR_FLAGS (popdist_py"),
        ("TF_CPP_VMODULE", "poplar_compiler=1", "IPUs: TF_CPP_VMODULE (popdist_py supports"),
        ("IPUOF_LOG_LEVEL", "DEBUG", "IPUs: IPUOF_LOG_LEVEL (use POPTORCH_LOG_LEVEL to set"),
        ("IPUOF_CONFIG_PATH", "file", "IPUs: IPUOF_CONFIG_PATH (use IPUOF_VIPU_API_PARTITION_ID"),
        ("IPUOF_VIPU_API_TIMEOUTS", "1", "IPUs: IPUOF_VIPU_API_TIMEOUTS (an unknown variable: did "
         "you mean IPUOF_VIPU_API_TIMEOUT?)"),
    ],
)  # fmt: skip
def test_variables_that_do_nothing_are_said_once_by_instance_0(name, value, text, log, monkeypatch):
    monkeypatch.setenv(name, value)
    for process in (1, 0, 0):
        options = poptorch.Options()
        options.Distributed.configureProcessId(process, 2)
        compiled(options)
    (line,) = texts(log, logging.WARNING)
    assert text in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POPLAR_ENGINE_OPTIONS", '{"debug.allowOutOfMemory": "true", "autoReport.all": "false"}'),
        ("IPUOF_VIPU_API_TIMEOUT", "600"),
        ("IPUOF_LOG_LEVEL", "WARN"),
        ("TF_CPP_VMODULE", "event_manager=1"),
        ("TF_CPP_MIN_LOG_LEVEL", "3"),
        ("POPLAR_LOG_LEVEL", ""),
        ("IPUOF_LOG_LEVEL", ""),
    ],
)
def test_variables_that_act_or_are_of_others_say_nothing(name, value, log, monkeypatch):
    monkeypatch.setenv(name, value)
    compiled(poptorch.Options())
    assert log.records == []


@pytest.mark.parametrize("where", ["program", "environment"])
@pytest.mark.parametrize("name", ["debug.floatPointOpException", "debug.nanOverflowException"])
def test_engine_options_switch_on_floating_point_exceptions(name, where, monkeypatch):
    options = poptorch.Options()
    assert not options.Precision.floating_point_exceptions
    if where == "program":
        options._Popart.setEngineOptions({name: "true"})
    else:
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", f'{{"{name}": "true"}}')
    inference = poptorch.inferenceModel(lambda x: 1 / x, options.showCompilationProgressBar(False))
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        inference(torch.zeros(1))


def test_engine_options_of_the_environment_are_an_object(monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "autoReport.all=true")
    with pytest.raises(poptorch.Error, match="expected a JSON object"):
        compiled(poptorch.Options())


@pytest.mark.parametrize("share", [1.5, -0.1, float("nan"), "0.5"])
def test_a_share_of_the_memory_is_from_0_to_1(share):
    with pytest.raises(AssertionError, match=r"memory proportion.*for IPU0"):
        poptorch.Options().setAvailableMemoryProportion({"IPU0": share})
    with pytest.raises(AssertionError, match=r"memory proportion.*for set_available_memory"):
        poptorch.set_available_memory(torch.ones(1), share)
    assert poptorch.Options().setAvailableMemoryProportion({"IPU0": 0, "IPU1": 1})


@pytest.mark.parametrize("indices", [{7}, {2, 3}, {-1}, {"0"}])
def test_a_call_that_no_instance_would_make(indices, monkeypatch):
    with pytest.raises(ValueError, match="The job has instance 0 only"):
        popdist_py.execute_on_instances(indices, print)
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "2")
    monkeypatch.setenv("POPDIST_NUM_LOCAL_REPLICAS", "1")
    monkeypatch.setenv("POPDIST_REPLICA_INDEX_OFFSET", "0")
    monkeypatch.setenv("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1")
    with pytest.raises(ValueError, match=r"no instance has one.*the instances 0 to 1"):
        popdist_py.execute_on_instances(indices, print)


@pytest.mark.parametrize(
    "indices", [np.array([0, 1]), iter([1, 0]), (i for i in (0, 7)), np.array([0])],
    ids=["array", "iterator", "generator", "array of one"],
)  # fmt: skip
def test_indices_may_come_as_any_iterable(indices):
    assert popdist_py.execute_on_instances(indices, lambda: 1) == 1


def test_a_call_of_some_instances_that_exist():
    assert popdist_py.execute_on_instances({0, 7}, lambda: 1) == 1
    assert popdist_py.execute_on_instances(set(), lambda: 1) is None
