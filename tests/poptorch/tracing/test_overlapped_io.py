"""Overlapped input and output: the rules that marked tensors must keep."""

import pytest
import torch
from torch import nn

from popdist_py.poptorch import ops
from popdist_py.poptorch.enums import (
    OutputMode,
    OverlapMode,
)
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.execution_strategies import (
    PipelinedExecution,
    ShardedExecution,
)
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.tracing.overlapped_io import OverlapMarks

LOOP = OverlapMode.OverlapAccumulationLoop


class Overlapped(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self._run = forward

    def forward(self, x, y):
        return self._run(x, y)


def check(forward, *, options=None, training=False, strategy=None):
    module = Overlapped(forward)
    options = options or io_options(strategy)
    inputs = torch.ones(2), torch.ones(2)
    marks = OverlapMarks(module, options.overlap_conditions(training), inputs)
    with ForwardWatch(overlap=marks).following():
        module(*inputs)


def io_options(strategy=None, tiles=32, mode=OutputMode.All):
    options = Options().setExecutionStrategy(strategy or ShardedExecution()).outputMode(mode)
    if tiles:
        options.TensorLocations.numIOTiles(tiles)
    return options


def mark_in(x, mode=LOOP):
    return ops.set_overlap_for_input(x, mode)


def mark_out(x, mode=LOOP):
    return ops.set_overlap_for_output(x, mode)


def test_marks_that_keep_the_rules():
    check(lambda x, y: mark_in(x) + y)
    check(lambda x, y: sum(mark_in((x, y))))
    check(lambda x, y: mark_out(x + y))
    check(lambda x, y: mark_out({"a": x + y, "b": [x * y]}))
    check(lambda x, y: (mark_out(z := x + y), z * 2))


@pytest.mark.parametrize("mode", list(OverlapMode))
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x, y, m: mark_in(y, m) + x + y, r"only op applied to an input, .* input 1"),
        (
            lambda x, y, m: mark_in(x, m) + y + mark_in(x, m),
            "only op applied to an input, .* input 0",
        ),
        (lambda x, y, m: mark_in(x + y, m), "node which is not a tensor input"),
        (lambda x, y, m: mark_out(x + y, m) * 2, "node which is not a tensor output"),
        (lambda x, y, m: (mark_out(z := x + y, m), z), "returns the tensor twice"),
        (lambda x, y, m: (z := mark_out(x + y, m), z), "returns the tensor twice"),
    ],
)
def test_marks_that_break_a_rule(forward, message, mode):
    for strategy in (PipelinedExecution(), ShardedExecution()):
        with pytest.raises(Error, match=message):
            check(lambda x, y: forward(x, y, mode), strategy=strategy)


def test_what_overlapping_needs():
    def forward(x, y):
        return mark_in(x) + y

    with pytest.raises(Error, match=r"not supported with poptorch.PipelinedExecution"):
        check(forward, options=io_options(PipelinedExecution()))
    with pytest.raises(Error, match="No IO tiles allocated"):
        check(forward, options=io_options(tiles=0))
    with pytest.raises(Error, match="output mode"):
        check(forward, options=io_options(mode=OutputMode.Final))
    with pytest.raises(Error, match="output mode"):
        check(forward, options=io_options(mode=OutputMode.Default), training=True)
    check(forward, options=io_options(mode=OutputMode.Default))
    check(
        lambda x, y: mark_in(x, OverlapMode.NoOverlap) + y,
        options=io_options(PipelinedExecution(), tiles=0, mode=OutputMode.Final),
    )
