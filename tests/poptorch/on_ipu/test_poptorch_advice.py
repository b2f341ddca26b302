"""The PopTorch calls in advice exist, and save the promised memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from poptorch.on_ipu.model_graphs import model_graph
from support.models import quiet_options

from popdist_py import popart, poptorch
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.searches import Run
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.what_if import Advice, Kind, explain
from popdist_py.poptorch.on_ipu.poptorch_advice import in_poptorch_terms
from popdist_py.poptorch.on_ipu.run_from_options import run_from_options
from tools.device.ipu_graphs import mlp, resnet

KINDS = get_args(Kind)
LARGE = model_graph(resnet([3, 4, 23, 3], 64, 64), ["layer3.8"])


def how(kind: Kind) -> str:
    graph = mlp([40_000, 40_000], 1)
    lack = explain(Run(graph, Placement.cut(graph), Settings(), MK2))
    one = Advice("a change", 1, fits=True, kind=kind)
    (advice,) = in_poptorch_terms(replace(lack, advice=(one,))).advice
    return advice.how


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_advice_has_a_call(kind):
    assert how(kind)


def keeping_everything():
    options = quiet_options()
    options._Popart.set("autoRecomputation", int(popart.RecomputationType.NoRecompute))
    return options


def asked(options):
    optimizer = poptorch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    return run_from_options(LARGE, options, optimizer, training=True)


@cache
def before():
    return asked(keeping_everything())


@cache
def promises():
    return {advice.kind: advice.saved for advice in explain(before()).advice}


@pytest.mark.parametrize(
    "kind",
    [
        "recomputation",
        "optimizer off chip",
        "activations off chip",
        "proportion",
        "half partials",
    ],
)
def test_calls_save_the_promised_memory(kind):
    options = keeping_everything()
    code = how(kind).removeprefix("call ").partition(" with an entry")[0]
    eval(code, {"options": options, "poptorch": poptorch, "popart": popart, "torch": torch})
    assert before().fullest.needed - asked(options).fullest.needed == promises()[kind] > 0
