"""Questions to lost and new hosts, which child processes ask."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from support.processes import wait_until

from poprun_py.errors import StartError
from poprun_py.running.supervise.other_hosts import HostWatch, NewHosts


class Changes:
    """Host changes whose lost hosts answer ``lost``, and whose new hosts answer their names."""

    def __init__(self, lost=""):
        self.is_waiting = bool(lost)
        self._lost = lost
        self.taken = []

    def ask_lost(self):
        return self._lost

    def ask_new(self, name, *, has_model):
        if name == "bad":
            raise StartError("bad host")
        return f"{name} {has_model}"

    def take_lost(self, answer):
        self.taken.append(answer)
        self.is_waiting = False
        return f"{answer} is back"

    def take_new(self, answer, *, is_problem):
        return ("" if is_problem else answer), json.dumps([answer, is_problem])


def run(watch, until):
    """Call ``on_time`` whenever it is due, as the supervisor does."""

    def is_done():
        now = time.monotonic()
        if now >= watch.next_deadline():
            watch.on_time(now)
        return until()

    wait_until(is_done, 20, "no answer")


def test_lost_hosts_are_asked_until_they_are_back():
    changes, reasons = Changes("node1"), []
    watch = HostWatch(changes, reasons.append)
    run(watch, lambda: reasons)
    assert (reasons, changes.taken) == (["node1 is back"], ["node1"])
    assert watch.next_deadline() == float("inf")
    changes.is_waiting = True  # the host is lost again before the job uses it
    watch.on_time(time.monotonic())
    assert watch.next_deadline() < float("inf")


def test_without_lost_hosts_nothing_is_asked():
    assert HostWatch(Changes(), print).next_deadline() == float("inf")


def test_hosts_that_users_add_are_asked_one_after_the_other():
    reasons, replies = [], []
    watch = HostWatch(Changes(), reasons.append)
    for name in ("bad", "node2"):
        watch.add(name, replies.append, time.monotonic(), has_model=name == "node2")
    run(watch, lambda: len(replies) == 2)
    assert list(map(json.loads, replies)) == [["bad host", True], ["node2 True", False]]
    assert reasons == ["node2 True"]


def test_a_watch_that_has_ended_asks_no_more():
    watch = HostWatch(Changes("node1"), pytest.fail)
    watch.on_time(0.0)
    watch.end()
    assert watch.next_deadline() == float("inf")


def test_an_answer_that_ends_the_attempt_is_the_last_one():
    changes, reasons = Changes("node1"), []

    def changed(reason):
        reasons.append(reason)
        watch.end()

    watch = HostWatch(changes, changed)
    watch.add("node2", reasons.append, 0.0, has_model=False)
    watch.add("node3", reasons.append, 0.0, has_model=False)
    run(watch, lambda: watch.next_deadline() == float("inf"))
    assert reasons[-1] == "node2 False"


def test_a_host_is_only_added_while_all_programs_run():
    asked, replies = [], []
    peer = SimpleNamespace(started={}, has_model=False)
    control = SimpleNamespace(peers={0: peer}, is_complete=True)
    shutdown = SimpleNamespace(stop=None)
    watch = SimpleNamespace(add=lambda name, *_, has_model: asked.append((name, has_model)))

    def request(call, _):
        peer.has_model = True
        call(None)

    new = NewHosts(watch, control, shutdown, request)
    new.add({"add_host": "node1"}, replies.append, 0.0)
    assert "are starting" in replies.pop()
    peer.started = {"pid": 1}
    shutdown.stop = object()
    new.add({"add_host": "node1"}, replies.append, 0.0)
    assert "are ending" in replies.pop()
    shutdown.stop = None
    new.add({"another": "request"}, replies.append, 0.0)
    assert replies.pop() == ""
    new.add({"add_host": "node1"}, replies.append, 0.0)
    assert (asked, replies) == ([("node1", True)], [])
