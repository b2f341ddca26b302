"""Waiting in torch.distributed and DistributedDataParallel, with a small imitation of torch."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from popdist_py import activities, heartbeat
from popdist_py.activities import COMPUTING, OTHER, WAITING, ledger, torch_waits

SECONDS = 0.2
NANOSECONDS = int(SECONDS * 1e9)


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setattr(ledger, "_words", None)
    monkeypatch.setattr(heartbeat, "_has_stepped", False)
    activities.begin()


@pytest.fixture
def torch(monkeypatch):
    """Replace torch by an imitation, in which every waiting function takes the same time."""

    class Work:
        def wait(self, timeout=None):
            time.sleep(SECONDS)
            return True

    def blocked(*values):
        time.sleep(SECONDS)
        return values

    distributed = SimpleNamespace(
        Work=Work,
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        _broadcast_coalesced=blocked,
    )
    torch = SimpleNamespace(
        autograd=SimpleNamespace(backward=blocked),
        compiler=SimpleNamespace(is_compiling=lambda: False),
        distributed=distributed,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return torch


def spent(activity):
    return ledger._words[ledger._NANOSECONDS + activity]


def test_a_collective_that_python_waits_for_is_waiting(torch):
    heartbeat.step()
    assert torch.distributed.Work().wait(timeout=5)
    assert spent(WAITING) >= NANOSECONDS


@pytest.mark.parametrize("where", ["backward", "_broadcast_coalesced"])
def test_where_backward_and_the_buffers_sleep_they_wait(torch, where):
    heartbeat.step()
    place = torch.autograd if where == "backward" else torch.distributed
    with activities.doing(COMPUTING):
        assert getattr(place, where)(1, 2) == (1, 2)
    assert spent(WAITING) >= NANOSECONDS * 0.9
    assert spent(COMPUTING) >= 0


def test_what_backward_computes_is_the_programs_own(torch):
    def computes():
        until = time.thread_time() + SECONDS
        while time.thread_time() < until:
            pass

    torch.autograd.backward = computes
    heartbeat.step()
    with activities.doing(COMPUTING):
        torch.autograd.backward()
    # The limit is not zero, because the host may take the CPU away.
    assert spent(WAITING) < NANOSECONDS / 2
    assert spent(COMPUTING) >= NANOSECONDS


def test_what_waits_within_backward_is_counted_once(torch):
    torch.autograd.backward = lambda: torch.distributed.Work().wait()
    heartbeat.step()
    began = time.monotonic_ns()
    torch.autograd.backward()
    assert NANOSECONDS <= spent(WAITING) <= time.monotonic_ns() - began


def test_what_torch_compiles_is_left_as_it_is(torch):
    torch.compiler.is_compiling = lambda: True
    heartbeat.step()
    assert torch.autograd.backward(1) == (1,)
    assert spent(WAITING) == 0


def test_another_thread_takes_no_time_of_the_program(torch):
    heartbeat.step()
    thread = threading.Thread(target=torch.autograd.backward)
    thread.start()
    thread.join()
    assert spent(WAITING) == 0


@pytest.mark.parametrize("how", ["alone", "not begun", "not imported", "not built"])
def test_a_program_that_does_not_use_it_is_left_alone(torch, monkeypatch, how):
    backward, wait = torch.autograd.backward, torch.distributed.Work.wait
    if how == "alone":
        torch.distributed.get_world_size = lambda: 1
    elif how == "not begun":
        torch.distributed.is_initialized = lambda: False
    elif how == "not built":
        torch.distributed.is_available = lambda: False
    else:
        monkeypatch.delitem(sys.modules, "torch.distributed")
    torch_waits.watch()
    assert (torch.autograd.backward, torch.distributed.Work.wait) == (backward, wait)


def test_a_torch_without_these_names_is_left_alone(torch):
    del torch.distributed._broadcast_coalesced
    torch_waits.watch()
    assert not hasattr(torch.distributed, "_broadcast_coalesced")
    torch.autograd.backward()
    with activities.doing(OTHER):
        pass
    assert spent(WAITING) >= NANOSECONDS * 0.9
