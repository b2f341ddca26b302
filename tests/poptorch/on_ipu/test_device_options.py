"""The type of IPU: from the program, from the launcher, or from variables, in this order."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from support.repository import ROOT

import popdist_py.poptorch as poptorch
from popdist_py.ipu.specification import BOW, IPUS, MK1, MK2

NAMED, MODEL, VERSION = "POPDIST_IPU", "POPTORCH_IPU_MODEL", "POPTORCH_IPU_MODEL_VERSION"
MEMORY = "POPDIST_IPU_MEMORY"


def emulator(monkeypatch=None, change=lambda _: None, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = poptorch.Options()
    change(options)
    return options.Emulator


def test_no_device_is_named_by_default():
    own = emulator()
    assert (own.device_named, own.ipu, own.memory_mode) == (None, MK2, "warn")


@pytest.mark.parametrize("name", IPUS)
def test_names(name):
    own = poptorch.Options().Emulator
    assert own.device(name) is own
    assert own.device_named is own.ipu is IPUS[name]
    assert own.memory_mode == "enforce"


def test_a_custom_device():
    small = replace(MK2, name="small", tiles=4)
    assert poptorch.Options().Emulator.device(small).device_named == small


@pytest.mark.parametrize("mode", ["enforce", "warn", "off"])
def test_modes(mode):
    assert poptorch.Options().Emulator.memory(mode).memory_mode == mode
    assert poptorch.Options().Emulator.memory(mode).device("mk1").memory_mode == mode


@pytest.mark.parametrize(
    ("variables", "change", "expected"),
    [
        ({NAMED: "bow"}, None, BOW),
        ({NAMED: "bow"}, lambda o: o.Emulator.device("mk1"), MK1),
        ({NAMED: "bow"}, lambda o: o.useIpuModel(True), BOW),
        ({NAMED: "bow"}, lambda o: o.useIpuModel(False), BOW),
        ({NAMED: ""}, None, None),
        ({MODEL: "1"}, None, MK2),
        ({MODEL: "0"}, None, None),
        ({MODEL: "1", VERSION: "ipu1"}, None, MK1),
        ({MODEL: "1", VERSION: "ipu2"}, None, MK2),
        ({MODEL: "1", VERSION: "ipu21"}, None, BOW),
        ({MODEL: "1", VERSION: "ipu1", NAMED: "bow"}, None, BOW),
        ({MODEL: "1"}, lambda o: o.useIpuModel(False), None),
        ({VERSION: "ipu1"}, None, None),
        ({VERSION: "ipu1"}, lambda o: o.useIpuModel(True), MK1),
        ({}, lambda o: o.useIpuModel(True), MK2),
        ({}, lambda o: o.useIpuModel(False), None),
        ({}, lambda o: o.useIpuModel(True).Emulator.device("mk1"), MK1),
        ({}, lambda o: o.Emulator.device("mk1") and o.useIpuModel(True), MK1),
        ({}, lambda o: o.useOfflineIpuTarget(1), MK1),
        ({}, lambda o: o.useOfflineIpuTarget(), MK2),
        ({NAMED: "mk1"}, lambda o: o.useOfflineIpuTarget(21), BOW),
    ],
)
def test_sources_of_the_device(variables, change, expected, monkeypatch):
    own = emulator(monkeypatch, change or (lambda _: None), **variables)
    assert own.device_named == expected
    assert own.memory_mode == ("warn" if expected is None else "enforce")


SDK_COMMAND = "POPDIST_SDK_COMMAND"


@pytest.fixture
def sdk_modules(monkeypatch):
    """Return a function that adds modules with the SDK's names to this process."""

    def have(**files):
        for name, file in files.items():
            module = ModuleType(name.replace("_", "."))
            if file is not None:
                module.__file__ = file
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return have


OURS = str(ROOT / "popdist_py" / "sdk_names" / "NAME" / "__init__.py")


@pytest.mark.parametrize("name", ["poptorch", "popdist_poptorch"])
def test_programs_with_the_sdks_names_run_as_on_an_mk2_under_its_commands(
    name, sdk_modules, monkeypatch
):
    sdk_modules(**{name: OURS})
    own = emulator()
    assert (own.device_named, own.memory_mode) == (None, "warn")
    own = emulator(monkeypatch, **{SDK_COMMAND: "1"})
    assert (own.device_named, own.memory_mode) == (MK2, "enforce")
    assert emulator(change=lambda o: o.useIpuModel(False)).device_named is MK2
    assert emulator(change=lambda o: o.Emulator.memory("warn")).memory_mode == "warn"
    assert emulator(monkeypatch, **{MEMORY: "warn"}).memory_mode == "warn"
    assert emulator(monkeypatch, **{NAMED: "bow"}).device_named is BOW


@pytest.mark.parametrize(
    "modules",
    [{}, {"poptorch": "/sdk/poptorch/__init__.py"}, {"poptorch": None}, {"popdist": OURS}],
)
def test_other_programs_do_not(modules, sdk_modules, monkeypatch):
    sdk_modules(**modules)
    own = emulator(monkeypatch, **{SDK_COMMAND: "1"})
    assert (own.device_named, own.memory_mode) == (None, "warn")


def test_the_device_model_is_used_for_memory_or_for_times():
    assert poptorch.Options().Emulator.asks_model
    assert not poptorch.Options().Emulator.memory("off").asks_model
    assert poptorch.Options().Emulator.memory("off").device("bow").asks_model


def test_mode_of_the_environment(monkeypatch):
    assert emulator(monkeypatch, **{MEMORY: "off"}).memory_mode == "off"
    assert emulator(change=lambda o: o.Emulator.device("bow")).memory_mode == "off"
    assert emulator(change=lambda o: o.Emulator.memory("warn")).memory_mode == "warn"
    monkeypatch.setenv(MEMORY, "")
    assert emulator().memory_mode == "warn"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda o: o.Emulator.device("gc2"), r"device\('gc2'\).*'mk1', 'mk2' or 'bow'"),
        (lambda o: o.Emulator.device(2), r"device\(2\)"),
        (lambda o: o.Emulator.device(None), r"device\(None\)"),
        (lambda o: o.Emulator.memory("ignore"), r"memory\('ignore'\).*'enforce', 'warn' or 'off'"),
        (lambda o: o.Emulator.memory(True), r"memory\(True\)"),
    ],
)
def test_wrong_values(act, text):
    with pytest.raises(ValueError, match=text):
        act(poptorch.Options())


@pytest.mark.parametrize(
    ("name", "value"), [(NAMED, "mk9"), (VERSION, "ipu3"), (MEMORY, "maybe"), (NAMED, "MK2")]
)
def test_wrong_variables(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}={value} .*: expected "):
        poptorch.Options()


def test_properties_are_read_only():
    own = poptorch.Options().Emulator
    for name in ("device_named", "memory_mode", "ipu"):
        with pytest.raises(AssertionError, match="Invalid option"):
            setattr(own, name, MK1)


def test_copies_keep_what_the_environment_said(monkeypatch):
    monkeypatch.setenv(NAMED, "bow")
    options = poptorch.Options()
    monkeypatch.delenv(NAMED)
    for twin in (options.clone(), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin.Emulator.device_named == BOW
    assert options._description() != poptorch.Options()._description()


def test_options_from_text():
    options = poptorch.Options().from_json('{"Emulator.device": "mk1", "Emulator.memory": "off"}')
    assert options.Emulator.device_named == MK1
    assert options.Emulator.memory_mode == "off"


def test_frozen_options_name_no_other_device():
    options = poptorch.Options()
    options._freeze()
    for act in (lambda: options.Emulator.device("mk1"), lambda: options.Emulator.memory("off")):
        with pytest.raises(AttributeError, match="frozen"):
            act()
