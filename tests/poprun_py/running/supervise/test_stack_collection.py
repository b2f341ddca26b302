"""Collection of stacks from the running instances, until all have answered or a deadline."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poprun_py.instance import control_protocol
from poprun_py.running.supervise.stacks import StackCollector

NEVER = float("inf")
STACKS = [{"pid": 1, "state": "S", "text": "Thread 0x01 (most recent call first):"}]


class Channel:
    """A control channel that keeps the frames that are sent to its instances."""

    def __init__(self, *running):
        self.sent = []
        self.peers = {
            index: SimpleNamespace(
                index=index, instance_end=None, started={"pid": 7} if runs else {}
            )
            for index, runs in enumerate(running)
        }

    def send_to(self, index, kind, value):
        self.sent.append((index, kind, value))


@pytest.fixture
def channel():
    return Channel(True, True)


@pytest.fixture
def collector(channel):
    return StackCollector(channel)


def members(groups):
    """Return the instances of each group."""
    return sorted(group.instances for group in groups)


def test_a_collection_ends_when_all_instances_have_answered(channel, collector):
    replies = []
    assert collector.next_deadline() == NEVER
    collector.collect(replies.append, 10.0)
    assert channel.sent == [(index, control_protocol.DUMP_STACKS, None) for index in (0, 1)]
    collector.take(0, STACKS)
    collector.on_time(10.1)
    assert replies == []
    collector.take(1, None)
    collector.take(7, STACKS)
    collector.on_time(10.2)
    assert [members(groups) for groups in replies] == [[(0,), (1,)]]
    collector.on_time(99.0)
    assert len(replies) == 1


def test_only_instances_whose_programs_run_are_asked():
    channel = Channel(True, False, True)
    channel.peers[2].instance_end = {"code": 0}
    StackCollector(channel).collect(print, 10.0)
    assert [index for index, *_ in channel.sent] == [0]


def test_a_collection_ends_at_its_deadline_without_the_missing_answers(collector):
    replies = []
    collector.collect(replies.append, 10.0)
    collector.take(1, STACKS)
    collector.on_time(12.9)
    assert replies == []
    collector.on_time(collector.next_deadline())
    ((without, _),) = replies
    assert without.instances == (0,)
    assert without.text == "no answer from the instance's wrapper"


def test_a_collection_without_running_instances_ends_at_once():
    collector, replies = StackCollector(Channel()), []
    collector.collect(replies.append, 10.0)
    assert collector.next_deadline() < 10.0
    collector.on_time(10.0)
    assert replies == [()]


def test_one_answer_serves_all_collections(collector):
    replies = []
    collector.collect(lambda groups: replies.append(("first", groups)), 10.0)
    collector.collect(lambda groups: replies.append(("second", groups)), 11.0)
    for index in (0, 1):
        collector.take(index, STACKS)
    collector.on_time(11.0)
    assert [(name, members(groups)) for name, groups in replies] == [
        ("first", [(0, 1)]),
        ("second", [(0, 1)]),
    ]
