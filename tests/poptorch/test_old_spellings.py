"""Programs of earlier PopTorch releases: every entry of the table does what the table says."""

from __future__ import annotations

import logging
import pickle
import sys
from functools import partial
from operator import attrgetter

import pytest
import torch
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import old_spellings
from popdist_py.poptorch.old_spellings import TABLE, How

_MODE, _PERIOD = poptorch.OutputMode.EveryN, 3


def _options(change):
    options = poptorch.Options()
    change(options)
    return repr(options)


def _of_optimizer(kind, arguments):
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **arguments)
    return {name: getattr(optimizer, name, None) for name in kind._own} | {
        "bias": optimizer.defaults.get("bias_correction"),
        "constant": optimizer.variable_attrs._variable_attributes,
    }


# What an argument is given, and what comes of the call.
_VALUES = {
    "output_mode": _MODE,
    "output_return_period": _PERIOD,
    "accum_type": torch.float16,
    "first_order_momentum_accum_type": torch.float16,
    "second_order_momentum_accum_type": torch.float16,
    "bias_correction": False,
}
_BESIDE = {
    "output_mode": {"output_return_period": _PERIOD},
    "output_return_period": {"output_mode": _MODE},
}
_CALLS = {
    "Options.outputMode()": lambda arguments: _options(lambda o: o.outputMode(**arguments)),
    "Options.anchorTensor()": lambda arguments: _options(
        lambda o: o.anchorTensor("short", "long", **arguments)
    ),
    "poptorch.trainingModel()": lambda arguments: poptorch.trainingModel(Mlp(), **arguments),
    "poptorch.inferenceModel()": lambda arguments: poptorch.inferenceModel(Mlp(), **arguments),
    **{
        f"poptorch.optim.{name}()": partial(_of_optimizer, getattr(poptorch.optim, name))
        for name in ("Adam", "AdamW", "LAMB", "RMSprop")
    },
}
# What the setters without effect are called with.
_NOTHING = {
    "traceModel": False,
    "runningStatisticsAlwaysFloat": True,
    "halfFloatCasting": poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat,
    "autocastPolicy": poptorch.autocasting.Policy(fp16=["linear"]),
    "IPUoFConfigFiles": "*.conf",
}


def _names(where):
    """Return the object that has the names of a place."""
    if not where.startswith("Options"):
        return sys.modules[f"popdist_py.{where}"]
    options = poptorch.Options()
    return getattr(options, where.removeprefix("Options.")) if "." in where else options


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(old_spellings, "_said", set())
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("spelling", TABLE, ids=lambda one: one.old_text)
def test_an_old_spelling_does_what_the_table_says_and_names_the_new_one_once(spelling, log):
    use = _use_argument if spelling.where.endswith("()") else _use_name
    if spelling.how is How.REFUSED:
        with pytest.raises((AttributeError, TypeError)) as refused:
            use(spelling)
        assert (
            str(refused.value) == f"{spelling.old_text} was removed from PopTorch: {spelling.why}"
        )
        return
    for _ in range(2):
        use(spelling)
    (line,) = [line for line in log.messages if spelling.old_text in line]
    assert line.endswith(spelling.new_text or spelling.why)


def _use_name(spelling):
    if spelling.old == "PostAndLoss":  # a member of today's enumeration, said by the setter
        poptorch.Options().Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.PostAndLoss
        )
        return
    owner = _names(spelling.where)
    found = getattr(owner, spelling.old)
    if spelling.how is How.NOTHING and not spelling.new:
        assert found(_NOTHING.get(spelling.old, True)) is owner
    elif spelling.given:
        assert found.func is getattr(owner, spelling.new)
        assert found.keywords == spelling.given
    else:
        assert found == attrgetter(spelling.new)(owner)


def _use_argument(spelling):
    call, value = _CALLS[spelling.where], _VALUES.get(spelling.new)
    beside = _BESIDE.get(spelling.new, {})
    was = call({spelling.old: value, **beside})
    if spelling.new:
        assert was == call({spelling.new: value, **beside})
        with pytest.raises(TypeError, match="both were given"):
            call({spelling.old: value, spelling.new: value, **beside})


def test_a_program_of_2021_trains(log):
    options = quiet_options().anchorMode(poptorch.AnchorMode.Sum).deviceIterations(2)
    options.Popart.set("enableOutlining", True)
    options.Training.accumulationReductionType(poptorch.ReductionType.Mean)
    options.Precision.autocastEnabled(False).autocastPolicy(poptorch.autocasting.default)
    options.anchor_return_period = 1
    assert options.anchor_mode == poptorch.OutputMode.Sum
    assert not options.defaultAnchorMode()

    class Model(Mlp):
        @poptorch.autocast()
        def forward(self, *args):
            with poptorch.autocast(enabled=False):
                return super().forward(*args)

    model = Model()
    optimizer = poptorch.optim.LAMBNoBias(model.parameters(), lr=0.1, accumType=torch.float32)
    assert isinstance(optimizer, poptorch.optim.LAMB)
    training = poptorch.trainingModel(model, options, optimizer)
    training(*classified(4))
    assert options._Popart.options["enableOutlining"]


def test_text_may_have_old_spellings(tmp_path, log):
    file = tmp_path / "options.conf"
    file.write_text("anchorMode(poptorch.AnchorMode.EveryN, 3)\n")
    wanted = _options(lambda o: o.outputMode(_MODE, _PERIOD))
    assert _options(lambda o: o.loadFromFile(file)) == wanted
    assert _options(lambda o: o.from_json('{"anchorMode": ["AnchorMode.EveryN", 3]}')) == wanted


def test_frozen_options_stay_as_they_are(log):
    options = poptorch.Options()
    options._freeze()
    for change in (
        lambda: options.anchorMode(poptorch.AnchorMode.All),
        lambda: setattr(options, "anchor_mode", poptorch.AnchorMode.All),
        lambda: options.Popart.set("enableOutlining", True),
    ):
        with pytest.raises(AttributeError, match="frozen"):
            change()


def test_no_name_of_today_is_in_the_table():
    for spelling in TABLE:
        plain = not spelling.where.endswith("()") and spelling.old != "PostAndLoss"
        if plain and spelling.how is How.SAME:
            owner = _names(spelling.where)
            names = {*vars(owner), *dir(type(owner)), *getattr(owner, "_values", {})}
            assert spelling.old not in names


def test_what_never_was_is_missing_as_ever(log):
    for owner in (poptorch, poptorch.enums, poptorch.optim, poptorch.Options()):
        assert not hasattr(owner, "anchorMood")
    assert not hasattr(poptorch, "IPU")
    assert pickle.loads(pickle.dumps(poptorch.AnchorMode.All)) is poptorch.OutputMode.All
    assert log.messages.count("poptorch.AnchorMode is deprecated: use poptorch.OutputMode") == 1


def test_only_instance_0_speaks_of_old_spellings(log, monkeypatch):
    from popdist_py.environment import InstanceEnvironment

    other = InstanceEnvironment(
        num_total_replicas=2, num_local_replicas=1, num_ipus_per_replica=1,
        replica_index_offset=1, local_instance_index=1, num_local_instances=2,
    )  # fmt: skip
    for name, value in other.to_environ().items():
        monkeypatch.setenv(name, value)
    assert poptorch.AnchorMode is poptorch.OutputMode
    assert log.messages == []
