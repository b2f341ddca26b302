"""Functions in turns: one at a time, in order, and none is left behind."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

from popdist_py.poptorch.execution.torch_modes import OneThread
from popdist_py.poptorch.group_norms.replica_scheduler import OneEnded, in_turns, meet


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def echo(values):
    return [f"{value}!" for value in values]


def test_all_come_to_a_meeting_before_one_goes_on():
    seen = []

    def run(name):
        seen.append(f"{name} begins")
        seen.append(meet(name))
        seen.append(meet(name.upper()))
        return name * 2

    told = []
    found = in_turns(
        [lambda: run("a"), lambda: run("b")],
        echo,
        resumed=lambda index: told.append(("on", index)),
        paused=lambda index: told.append(("off", index)),
    )
    assert found == ["aa", "bb"]
    assert seen == ["a begins", "b begins", "a!", "b!", "A!", "B!"]
    assert told == [("on", 0), ("off", 0), ("on", 1), ("off", 1)] * 3


def test_an_error_is_the_callers_and_ends_the_others_where_they_wait():
    ended = []

    def waits():
        try:
            meet(1)
        finally:
            ended.append("waited")

    def fails():
        meet(2)
        raise LookupError("of one")

    with pytest.raises(LookupError, match="of one"):
        in_turns([waits, lambda: meet(meet(3)), fails, waits], echo)
    assert ended == ["waited", "waited"]


def test_an_error_of_the_answers_ends_all():
    def refuse(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_turns([lambda: meet(1), lambda: meet(2)], refuse)


def test_what_keeps_a_thread_from_starting_is_raised_as_itself(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        if thread.name == "turn 1":
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_turns([lambda: meet(1), lambda: meet(2)], echo)


def test_one_that_ends_early_is_named():
    with pytest.raises(OneEnded) as caught:
        in_turns([lambda: meet("asked"), lambda: None], echo)
    assert (caught.value.ended, caught.value.waiting, caught.value.value) == (1, 0, "asked")


def test_the_meeting_is_in_the_callers_thread_and_a_backward_waits():
    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x * 2

        @staticmethod
        def backward(_, gradient):
            return meet(gradient)

    def run(value):
        x = torch.tensor(value, requires_grad=True)
        Meeting.apply(x).backward()
        return float(x.grad)

    caller, threads = threading.current_thread(), []

    def add(gradients):
        threads.append(threading.current_thread())
        return [sum(gradients)] * len(gradients)

    assert in_turns([lambda: run(1.0), lambda: run(2.0), lambda: run(3.0)], add) == [3.0] * 3
    assert threads == [caller]


def test_functions_find_torch_as_the_caller_has_it():
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.add else result

    def look():
        meet(None)
        dtype = torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
        added = float(torch.add(torch.ones(()), 1))
        return torch.is_grad_enabled(), torch.get_num_threads(), dtype, added

    with torch.no_grad(), OneThread(), torch.autocast("cpu", torch.bfloat16), Doubling():
        found = in_turns([look, look], echo)
    assert found == [(False, 1, torch.bfloat16, 4.0)] * 2


def test_nothing_to_meet_outside_of_turns():
    with pytest.raises(RuntimeError, match="outside of the turns"):
        meet(1)
