"""The loop on the device: windows of micro-batches, each ended by one update."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from support.models import quiet_options

from popdist_py.poptorch import OutputMode
from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.execution.device_loop import Program

LEAVES = [torch.arange(12.0)]
CALL = Call.of(LEAVES, {})


class Log:
    """Every part of a program at once: notes in which order the loop asks for what."""

    needs_context = True
    scale = 1.0

    def __init__(self, training):
        self.events = []
        options = quiet_options().deviceIterations(3).outputMode(OutputMode.All)
        if training:
            options.Training.gradientAccumulation(2)
        self.program = Program(
            batching=options.batching(training=training),
            replicas=self,
            back_end="loop",
            training=self if training else None,
            context=SimpleNamespace(enter=self.enter, is_random=False, modes=()),
            num_outputs=1,
            anchors=SimpleNamespace(
                begin=lambda: None,
                set_scale=lambda _: None,
                after_step=lambda step, *_: self.note("anchors", step),
            ),
            counters=SimpleNamespace(
                begin=lambda: None,
                input=lambda step: self.note("in", step),
                output=lambda step: self.note("out", step),
            ),
        )

    def note(self, *event):
        self.events.append(event)

    def enter(self):
        self.note("enter")
        stack = ExitStack()
        stack.callback(self.note, "leave")
        return stack

    def run(self, call, inputs, number, scale):
        assert call is CALL
        self.note("run", number)
        return [[inputs[0] * 2]]

    def zero(self):
        self.note("zero")

    def accumulate(self):
        self.note("accumulate")

    def step(self, number):
        self.note("step", number)


def test_training_zeroes_accumulates_and_steps():
    log = Log(training=True)
    log.program.steps_done = 100
    (result,) = log.program.run(CALL, LEAVES)
    window = [
        ("zero",),
        ("in", 0), ("run", 100), ("accumulate",), ("anchors", 0), ("out", 0),
        ("in", 1), ("run", 101), ("accumulate",), ("step", 101), ("anchors", 1), ("out", 1),
    ]  # fmt: skip
    expected = [
        (name, *(number + 2 * iteration for number in rest))
        for iteration in range(3)
        for name, *rest in window
    ]
    assert log.events == [("enter",), *expected, ("leave",)]
    assert log.program.steps_done == 106
    assert torch.equal(result, LEAVES[0] * 2)


def test_inference_only_runs():
    log = Log(training=False)
    (result,) = log.program.run(CALL, LEAVES)
    names = {event[0] for event in log.events}
    assert names == {"enter", "in", "run", "anchors", "out", "leave"}
    assert [event[1] for event in log.events if event[0] == "run"] == [0, 1, 2]
    assert torch.equal(result, LEAVES[0] * 2)


@pytest.mark.parametrize("training", [True, False])
def test_a_step_that_fails_leaves_the_context(training):
    log = Log(training)
    log.run = None
    with pytest.raises(TypeError):
        log.program.run(CALL, LEAVES)
    assert log.events[-1] == ("leave",)
