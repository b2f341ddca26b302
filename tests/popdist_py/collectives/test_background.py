"""Collective calls are refused in a forked child of an instance."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import WithLoss, quiet_options

import popdist_py
from popdist_py import context, poptorch
from popdist_py.collectives.background import Background
from popdist_py.errors import InstanceLostError


def in_a_child(function):
    """Call ``function`` in a forked child, and return its result or the name of its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_child_waits_for_no_call_of_its_parents():
    background = Background()
    done = background.submit(lambda: 3)
    assert done.wait() == 3
    pending = background.submit(lambda: None)
    background.drain()
    pending._done.clear()  # the call seems to run when the child is forked
    for call in (pending.wait, background.drain, lambda: background.submit(int)):
        assert in_a_child(call) == "ForkedProcessError"
    assert in_a_child(done.wait) == "3"
    assert background.submit(lambda: 4).wait() == 4


def test_a_child_of_an_instance_alone_has_a_background_of_its_own():
    background = Background(is_alone=True)
    assert background.submit(lambda: 3).wait() == 3
    assert in_a_child(lambda: background.submit(lambda: 5).wait()) == "5"


def test_a_child_does_not_train(monkeypatch):
    """The child would write its gradients to the memory that the instances share."""
    background = Background()
    monkeypatch.setattr(context, "_communicator", SimpleNamespace(background=background))
    options = quiet_options()
    trained = poptorch.trainingModel(WithLoss(torch.nn.Linear(2, 2)), options)
    background.begin_in_child()
    with pytest.raises(popdist_py.ForkedProcessError, match="cannot make collective calls"):
        trained(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_child_ends_as_usual_and_the_instances_go_on(poprun, count):
    """Other instances would mistake a child's call for its parent's next call."""
    alone = {"": "SoloCommunicator"}
    together = {
        "": "GroupCommunicator",
        "TEST_WITHOUT_READING=1": "GroupCommunicator",
        "TEST_NUM_HOSTS=2": "GroupCommunicator",
        "POPDIST_SHARED_MEMORY=0": "GroupCommunicator",
    }
    expected = alone if count == 1 else together
    program = Path(__file__).with_name("forked_children_program.py")
    words = ("--num-instances", count, "--num-replicas", count, "--oversubscribe")
    done = poprun(*words, program, *expected)
    assert done.returncode == 0, done.stderr[-3000:]
    for way, communicator in expected.items():
        line = f"[{way}] {communicator} of {count} goes on"
        assert done.stdout.count(line) == count, done.stdout


def test_its_thread_ends_once_all_calls_are_made():
    background = Background()
    handles = [background.submit(partial(int, number)) for number in range(3)]
    thread = background._thread
    background.end()
    thread.join(10)
    assert not thread.is_alive()
    assert [handle.wait() for handle in handles] == [0, 1, 2]


def test_no_later_call_of_any_thread_is_made_after_a_refusal():
    background, is_refused = Background(), threading.Event()

    def leave():
        is_refused.wait(10)
        background.refuse(InstanceLostError("this instance has left"))

    first, second = background.submit(leave), background.submit(background.drain)
    is_refused.set()
    first.wait()
    for call in (second.wait, background.drain, background.drain, lambda: background.submit(int)):
        with pytest.raises(InstanceLostError, match="this instance has left"):
            call()
