"""The table of options' effects agrees with the code that reads and stores options."""

from __future__ import annotations

import ast
import inspect
from functools import cache

import pytest
from support.repository import ROOT

from popdist_py import poptorch
from popdist_py.poptorch.options import engine_options, session
from popdist_py.poptorch.options.engine_options import engine_option
from popdist_py.poptorch.options.option_effects import (
    ENGINE,
    LOCATIONS,
    SESSION,
    STORED,
    STRATEGY,
    Effect,
)
from popdist_py.poptorch.options.session import session_option

SESSION_READERS = {"session_value", "session_member"}
ENGINE_READERS = {"engine_value", "is_engine_option_on"}
# Other methods of Options._Popart. ``changed_rows`` is the search for options without effect.
OTHER_METHODS = {"changed_rows", "check", "set", "update"}
# Methods that write or delete the value whose name is their argument.
WRITERS = {"_locate", "_put", "deleteIfExists", "pop"}
# The table, and the classes of execution strategies. They name options, but do not implement them.
LEFT_OUT = {
    ROOT / "popdist_py/poptorch/options/option_effects.py",
    ROOT / "popdist_py/poptorch/placement/execution_strategies.py",
}


@cache
def texts(folder):
    """Return the texts of the modules in a folder."""
    paths = set((ROOT / folder).rglob("*.py")) - LEFT_OUT
    return [path.read_text(encoding="utf-8") for path in paths]


tree_of = cache(ast.parse)


def nodes(kinds, words, folder="popdist_py"):
    """Yield the syntax nodes of these kinds in the modules that contain one of the words."""
    for text in texts(folder):
        if not any(word in text for word in words):
            continue
        for node in ast.walk(tree_of(text)):
            if isinstance(node, kinds):
                yield node


def calls_of(methods):
    for call in nodes(ast.Call, methods):
        if isinstance(call.func, ast.Attribute) and call.func.attr in methods:
            yield call


def names_read_with(methods, argument_count):
    """Return the option names in calls of accessors outside the class _PopartOptions."""
    for call in calls_of(methods):
        if getattr(call.func.value, "id", "") == "self":
            continue
        for argument in call.args[:argument_count]:
            choices = (
                (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,)
            )
            for choice in choices:
                assert isinstance(choice, ast.Constant), ast.unparse(call)
                yield choice.value


def acting(table):
    return {name for name, row in table.items() if row.acts}


@pytest.fixture(scope="module")
def names_read():
    """The attributes that modules read, and the texts that are not names for a writing method."""
    found = set()
    not_read = set()
    kinds = (ast.Attribute, ast.Call, ast.Constant, ast.Set)
    for node in nodes(kinds, [""], "popdist_py/poptorch"):
        # ``ast.walk`` yields a node before its children. Sets contain the known names of options.
        if isinstance(node, ast.Set):
            not_read.update(map(id, node.elts))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WRITERS:
            not_read.update(map(id, node.args))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and id(node) not in not_read:
            found.add(node.value)
    return found


def test_the_session_options_with_an_effect_are_those_that_are_read():
    assert set(names_read_with(SESSION_READERS, 1)) == acting(SESSION)


def test_the_engine_options_with_an_effect_are_those_that_are_read():
    assert set(names_read_with(ENGINE_READERS, None)) == acting(ENGINE)


def test_session_options_are_read_only_with_the_accessors():
    values = ("_Popart", "_popart")
    used = {
        node.attr
        for node in nodes(ast.Attribute, values)
        if isinstance(node.value, ast.Attribute) and node.value.attr in values
    }
    assert used <= SESSION_READERS | ENGINE_READERS | OTHER_METHODS


@pytest.mark.parametrize("name", ["outlineThreshold", "accumulationFactor", "enableStableNorm"])
def test_a_session_option_without_effect_cannot_be_read(name):
    with pytest.raises(AssertionError, match=f"{name} has no effect"):
        poptorch.Options()._Popart.session_value(name)


@pytest.mark.parametrize("name", ["prng.seed", "debug.allowOutOfMemory", "zzz"])
def test_an_engine_option_without_effect_cannot_be_read(name):
    with pytest.raises(AssertionError, match=f"{name} has no effect"):
        poptorch.Options()._Popart.engine_value(name)


def test_every_known_session_option_has_a_row():
    for name in session._KNOWN:
        row = session_option(name)
        if name not in SESSION:
            assert row.effect is Effect.HARDWARE
            assert not row.why
    stems = {name.partition(" ")[0].partition(".")[0] for name in SESSION}
    assert stems <= session._KNOWN
    assert {name.partition(" ")[0] for name in SESSION if " " in name} < session._DICTIONARIES


def test_every_known_engine_option_has_one_row():
    assert not engine_options._HARDWARE_ONLY & ENGINE.keys()
    assert {engine_option(name).effect for name in engine_options._HARDWARE_ONLY} == {
        Effect.HARDWARE
    }
    assert engine_option("zzz").effect is Effect.NOTHING


@pytest.mark.parametrize(
    ("name", "written", "effect"),
    [
        ("automaticLossScalingSettings.enabled", None, Effect.RESULTS),
        ("automaticLossScalingSettings.toTensor", None, Effect.HARDWARE),
        ("enablePipelining.part", None, Effect.HARDWARE),
        ("dotChecks.part", "_Popart dotChecks", Effect.NOTHING),
        ("patterns.Gelu", "_Popart.setPatterns", Effect.HARDWARE),
        ("matmulOptions partialsType", None, Effect.HARDWARE),
        ("convolutionOptions partialsType", None, Effect.DEVICE),
    ],
)
def test_rows_of_session_options_with_parts(name, written, effect):
    row = session_option(name)
    assert (row.name, row.effect) == (written or f"_Popart {name}", effect)


def test_every_stored_option_has_a_row():
    options = poptorch.Options()
    groups = {name: group for name, group in options._groups().items() if name != "_Popart"}
    stored = {name for store in (options, *groups.values()) for name in store._values}
    stored |= {word.arg for call in calls_of({"createOrSet"}) for word in call.keywords if word.arg}
    stored |= {call.args[0].value for call in calls_of({"_locate"})}
    of_every_store = {"_values", "_defaults", "_is_frozen"}
    stored |= options.__dict__.keys() - groups.keys() - of_every_store - {"_Popart"}
    assert STORED.keys() == stored


@pytest.mark.parametrize("table", [STORED, LOCATIONS, STRATEGY], ids=["stored", "where", "how"])
def test_options_with_an_effect_are_read(table, names_read):
    assert acting(table) - names_read == set()


def test_stored_options_without_effect_are_not_read(names_read):
    idle = {name for name in STORED.keys() - acting(STORED) if not name.startswith("_")}
    assert idle & names_read == set()


def test_every_setting_of_a_tensor_location_has_a_row():
    settings = poptorch.TensorLocationSettings()
    for name, setter in inspect.getmembers(settings, inspect.ismethod):
        if not name.startswith("_") and name != "toDict":
            setter(*([1] if name.startswith("min") else []))
    assert settings.toDict().keys() == LOCATIONS.keys()


def test_every_setting_of_an_execution_strategy_has_a_row():
    strategies = {
        *(poptorch.ShardedExecution, poptorch.PipelinedExecution),
        *(poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution),
    }
    settings = {
        name
        for kind in strategies
        for name, value in inspect.getmembers(kind)
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }
    assert settings == STRATEGY.keys()


def test_rows_give_a_reason_where_an_option_does_nothing():
    for table in (STORED, SESSION, ENGINE, LOCATIONS, STRATEGY):
        for row in table.values():
            assert bool(row.why) == (row.effect in (Effect.NOTHING, Effect.UNLOGGED)), row
